# Two images from one file, without a shell or a package manager at work in either at run time:
#
#   docker build --target operator -t reprise-operator .
#   docker build --target engine   -t reprise-engine   .          # PyTorch for CPUs
#   docker build --target engine   -t reprise-engine-npu \
#     --build-arg BASE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11 --build-arg EXTRAS=npu .   # A2; a3, 310p: docs/ascend.md
#
# `make images` builds the first two by whichever of docker, podman and buildah works here.
# The secret `pip`, where given, is a pip.conf (an index of your own, its credentials): it never reaches a layer.
# Health is the probes' business (the operator writes them), so there is no health check here.

ARG BASE=docker.io/library/python:3.11-slim-bookworm

# ---------------------------------------------------------------- tools: pip and hatchling, in no final image
FROM ${BASE} AS tools
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /tools && /tools/bin/pip install -q -c constraints.txt hatchling

# ---------------------------------------------------------------- operator: its environment, made apart
FROM tools AS operator-env
COPY operator/pyproject.toml operator/
# Dependencies first: they change seldom, the source often.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv --without-pip /opt/reprise \
 && python3 -c "import tomllib; print(*tomllib.load(open('operator/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
 && /tools/bin/pip --python /opt/reprise/bin/python install -q -c constraints.txt -r requirements.txt
COPY operator/ operator/
# The wheel, no dependency but the pinned ones, and the check that none of them has brought an ML framework along.
RUN /tools/bin/pip wheel -q --no-deps --no-build-isolation -w wheels ./operator \
 && /tools/bin/pip --python /opt/reprise/bin/python install -q --no-index --no-deps wheels/*.whl \
 && /tools/bin/pip --python /opt/reprise/bin/python check \
 && /opt/reprise/bin/python -c "import sys, importlib.util as u; found = [m for m in ('torch', 'transformers', 'numpy', 'reprise_engine') if u.find_spec(m)]; sys.exit(f'in the operator image: {found}' if found else 0)"

# ---------------------------------------------------------------- kernels: the CPU kernels, for a final image that has no compiler
FROM ${BASE} AS kernels
WORKDIR /src
# --build-arg KERNELS=0 leaves them out: the engine then runs on plain torch, and says so.
ARG KERNELS=1
RUN if [ "$KERNELS" = 1 ] && ! command -v g++ >/dev/null; then \
      apt-get update -q && apt-get install -q -y --no-install-recommends g++ libc6-dev; \
    fi
COPY engine/reprise_engine/native/ native/
RUN test "$KERNELS" != 1 || python3 native/build.py

# ---------------------------------------------------------------- engine: its environment, made apart
FROM tools AS engine-env
# EXTRAS=npu adds torch_npu and, since CANN's own Python parts lean on packages of its base image, lets the environment see those.
ARG EXTRAS=""
# Where torch comes from: on x86-64 the general index serves the CUDA build, several GB of it. Empty: the general index.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY engine/pyproject.toml engine/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv --without-pip $(test "$EXTRAS" != npu || echo --system-site-packages) /opt/reprise \
 && /tools/bin/pip --python /opt/reprise/bin/python install -q -c constraints.txt --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch \
 && python3 -c "import sys, tomllib; p = tomllib.load(open('engine/pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *(r for e in sys.argv[1:] for r in p['optional-dependencies'][e]), sep='\n')" $EXTRAS > requirements.txt \
 && /tools/bin/pip --python /opt/reprise/bin/python install -q -c constraints.txt -r requirements.txt
COPY engine/ engine/
COPY --from=kernels /src/native/ engine/reprise_engine/native/
# Tried at once where it can be: torch_npu cannot be imported without an NPU's driver.
RUN /tools/bin/pip wheel -q --no-deps --no-build-isolation -w wheels ./engine \
 && /tools/bin/pip --python /opt/reprise/bin/python install -q --no-index --no-deps wheels/*.whl \
 && if [ "$EXTRAS" != npu ]; then /tools/bin/pip --python /opt/reprise/bin/python check && /opt/reprise/bin/python -c "import torch, transformers"; fi

# ---------------------------------------------------------------- final: operator
FROM ${BASE} AS operator
RUN echo 'reprise:x:65532:65532:reprise:/home/reprise:/usr/sbin/nologin' >> /etc/passwd \
 && echo 'reprise:x:65532:' >> /etc/group \
 && install -d -m 0755 -o 65532 -g 65532 /home/reprise
COPY --from=operator-env /opt/reprise /opt/reprise
COPY LICENSE /licenses/LICENSE
ENV PATH=/opt/reprise/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# By number, so that runAsNonRoot can be verified.
USER 65532:65532
WORKDIR /home/reprise
# 8080 metrics, 8081 health
EXPOSE 8080 8081
ENTRYPOINT ["reprise-operator"]
CMD ["run", "--all-namespaces"]
# Last, as they change with every commit.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="reprise-operator" \
      org.opencontainers.image.description="Kubernetes operator for prefix-caching LLM inference (InferenceService, serving.reprise.io)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# ---------------------------------------------------------------- final: engine
FROM ${BASE} AS engine
RUN echo 'reprise:x:65532:65532:reprise:/home/reprise:/usr/sbin/nologin' >> /etc/passwd \
 && echo 'reprise:x:65532:' >> /etc/group \
 && install -d -m 0755 -o 65532 -g 65532 /home/reprise
COPY --from=engine-env /opt/reprise /opt/reprise
COPY LICENSE /licenses/LICENSE
# The last one: torch is not to import torch_npu by itself, which fails without a driver, where a check of arguments or of
# a model needs none. The engine imports it, and says what is missing.
ENV PATH=/opt/reprise/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0
USER 65532:65532
WORKDIR /home/reprise
EXPOSE 8000
ENTRYPOINT ["reprise"]
CMD ["--help"]
# Last, as they change with every commit.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="reprise-engine" \
      org.opencontainers.image.description="Prefix-caching LLM inference engine for Ascend NPUs and CPUs, with an OpenAI-compatible server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
