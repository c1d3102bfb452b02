# A function's own image: Cicada's, with one prepared model inside, and what of your code and packages serves it.
#
#   docker build -f docker/function.Dockerfile --build-arg MODEL=flowers \
#       --build-arg PREPARE="--architecture resnet18 --checkpoint flowers.pth" -t flowers FOLDER
#
#   docker build -f docker/function.Dockerfile --build-arg MODEL=mine \
#       --build-arg CODE="net.py layers" --build-arg PACKAGES="-r requirements.txt ./mypackage" \
#       --build-arg PREPARE="--factory net.py:make --processing net.py --checkpoint net.pth --example 1x3x224x224" \
#       -t mine FOLDER
#
# All paths count from FOLDER, the build's context.
#
# IMAGE     Cicada's image
# MODEL     the model's name in the store; it is the service's default model
# PREPARE   what `cicada prepare MODEL` is told
# CODE      the files and folders that the model is served with: they keep their places, below /function
# PACKAGES  what `pip install` is told. Cicada's own packages stay as they are: what needs others of them is refused
ARG IMAGE=cicada


FROM ${IMAGE} AS prepared
ARG MODEL
ARG PREPARE=--pretrained
ARG CODE
ARG PACKAGES
USER root
WORKDIR /function
COPY . .
RUN : "${MODEL:?is not set: --build-arg MODEL=resnet50}" \
    && mkdir /packages \
    && if [ -n "${PACKAGES}" ]; then \
         pip="pip --python /opt/cicada/bin/python" \
         && $pip list --format=freeze > /tmp/ours.txt \
         && $pip install --no-cache-dir --constraint /tmp/ours.txt --prefix /packages ${PACKAGES}; \
       fi
# When the model is checked, all but CODE has gone: what is missing shows here, not where it is served.
RUN cicada prepare "${MODEL}" ${PREPARE} \
    && mkdir -p /image/function \
    && if [ -n "${CODE}" ]; then cp --recursive --parents ${CODE} /image/function; fi \
    && cd / \
    && rm -r /function \
    && mv /image/function / \
    && cicada inspect "${MODEL}" --verify \
    && chmod -R a+rX /function /packages \
    && mv /function /packages /weights /image


# One layer, whatever is in it.
FROM ${IMAGE}
ARG MODEL
COPY --from=prepared --chown=10001:0 /image /
ENV CICADA_DEFAULT_MODEL=${MODEL}
LABEL org.opencontainers.image.title="Cicada: ${MODEL}"
