# One image for every pod: head, ranks, router, frontend. Built from the project's folder:
#   docker build --build-arg VERSION=0.1.0 --tag tandem:0.1.0 .
# The devel image stays below the final stage, since FlashInfer and Triton compile for the GPU that a pod has.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM ghcr.io/astral-sh/uv:0.9.5 AS uv

FROM ${CUDA_IMAGE} AS build
ARG PYTHON_VERSION=3.12.12
COPY --from=uv /uv /usr/local/bin/uv
ENV UV_PYTHON_INSTALL_DIR=/opt/python \
    UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1 \
    VIRTUAL_ENV=/opt/tandem
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN uv python install "${PYTHON_VERSION}" && uv venv --python "${PYTHON_VERSION}" /opt/tandem
# What changes seldom comes first. Every version is in the lock, made by docker/lock.sh.
COPY docker/requirements.lock /build/requirements.lock
RUN uv pip install --no-cache --no-deps --requirement /build/requirements.lock
WORKDIR /build
COPY pyproject.toml README.md ./
COPY common common
COPY kernels kernels
COPY model model
COPY kv_transfer kv_transfer
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY cluster cluster
COPY frontend frontend
RUN uv pip install --no-cache --no-deps .
# CUDA kernels need the compiler alone. FlashInfer and Triton need a GPU: a pod's `prepare` compiles theirs.
ENV HOME=/opt/home
RUN mkdir -p /opt/home && /opt/tandem/bin/python -c "from kernels.cuda_library import build_all; build_all()"

FROM ${CUDA_IMAGE} AS tandem
ARG VERSION=0.0.0
LABEL org.opencontainers.image.title="tandem" \
      org.opencontainers.image.version="${VERSION}"
# Ubuntu's image has a user of its own under this id; KubeRay and the chart expect 1000.
RUN (userdel --remove ubuntu 2>/dev/null || true) \
 && groupadd --gid 1000 tandem \
 && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash tandem \
 && install --directory --owner=1000 --group=1000 /var/cache/tandem /models
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/tandem /opt/tandem
COPY --from=build --chown=1000:1000 /opt/home/.cache /home/tandem/.cache
ENV PATH=/opt/tandem/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    TRITON_CACHE_DIR=/var/cache/tandem/triton \
    FLASHINFER_WORKSPACE_BASE=/var/cache/tandem/flashinfer \
    DG_JIT_CACHE_DIR=/var/cache/tandem/deep-gemm
USER 1000:1000
WORKDIR /home/tandem
EXPOSE 50051 8000
ENTRYPOINT []
CMD ["tandem", "--help"]
