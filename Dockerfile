# Cicada's image: `docker build -t cicada .`
#
# BASE         any Python 3.11 on Debian: a mirror's, a digest, a hardened one. Named in full, as its label is to be.
# TORCH_INDEX  where torch and torchvision come from; unset: pip's own index, whose torch brings CUDA's libraries.
ARG BASE=docker.io/library/python:3.11-slim-bookworm


FROM ${BASE} AS requirements
WORKDIR /project
COPY pyproject.toml ./
COPY constraints.txt docker/trim.py /build/
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    print(*project["dependencies"], *project["optional-dependencies"]["otel"], sep="\n")' > /build/requirements.txt


FROM ${BASE} AS application
WORKDIR /build
# Only so that what is installed names the interpreter that will run it.
RUN python -m venv --without-pip /opt/cicada
COPY pyproject.toml constraints.txt README.md ./
COPY runtime runtime
COPY handler handler
COPY models models
COPY bench bench
RUN PIP_CONSTRAINT=constraints.txt pip --python /opt/cicada/bin/python install --no-cache-dir --no-deps --target /opt/app .


FROM ${BASE}
ARG TORCH_INDEX
COPY --from=requirements /build /build
# torch's index need not have what torch depends on: that comes with all the rest. Installed here, not copied from
# another stage: copying gigabytes takes as long as installing them. After all that is ours, a function's own code is
# found in /function, and its packages in /packages (docker/function.Dockerfile).
RUN python -m venv --without-pip /opt/cicada \
    && install="pip --python /opt/cicada/bin/python install --no-cache-dir --constraint /build/constraints.txt" \
    && $install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch torchvision \
    && $install --requirement /build/requirements.txt \
    && /opt/cicada/bin/python /build/trim.py \
    && packages="$(/opt/cicada/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && printf '%s\n' /opt/app /function "/packages${packages#/opt/cicada}" > "$packages/app.pth" \
    && rm -rf /build /tmp/*
# Group 0, as platforms that choose the user themselves give it: whoever runs it may prepare models.
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin cicada \
    && install --directory --owner 10001 --group 0 --mode 2775 /weights
ENV PATH=/opt/app/bin:/opt/cicada/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    CICADA_WEIGHTS=/weights \
    PORT=8080
USER 10001:0
WORKDIR /tmp
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s --retries=3 CMD ["cicada", "health"]
ENTRYPOINT ["cicada"]
CMD ["serve"]
# Last, since it changes with every commit: a few megabytes.
COPY --from=application /opt/app /opt/app
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="Cicada" \
      org.opencontainers.image.description="Serves image classification, and torch models of your own, from containers that keep no model in memory" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE}"
