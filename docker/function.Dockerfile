# A function's own image: Cicada's, with one prepared model inside.
#
#   docker build -f docker/function.Dockerfile --build-arg MODEL=flowers \
#       --build-arg PREPARE="--architecture resnet18 --checkpoint flowers.pth" -t flowers FOLDER
#
# IMAGE    Cicada's image
# MODEL    the model's name in the store; it is the service's default model
# PREPARE  what `cicada prepare MODEL` is told; paths count from FOLDER, the build's context
ARG IMAGE=cicada


FROM ${IMAGE} AS prepared
ARG MODEL
ARG PREPARE=--pretrained
WORKDIR /context
COPY . .
RUN cicada prepare "${MODEL:?is not set: --build-arg MODEL=resnet50}" ${PREPARE}


FROM ${IMAGE}
ARG MODEL
COPY --from=prepared --chown=10001:0 /weights /weights
ENV CICADA_DEFAULT_MODEL=${MODEL}
LABEL org.opencontainers.image.title="Cicada: ${MODEL}"
