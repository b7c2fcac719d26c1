# mtp-export with its server. A build for CPUs takes PyTorch from the index that TORCH_INDEX names; without
# one pip's default is taken, whose build for x86 has CUDA. For GPUs:
#   docker build --build-arg EXTRAS=serve,cuda .
FROM python:3.11-slim-bookworm

ARG EXTRAS=serve
ARG TORCH_INDEX=""

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY mtp_export mtp_export
COPY runtime runtime
COPY checkpoints checkpoints
COPY kernels kernels
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]" \
    && useradd --create-home --uid 1000 user \
    && mkdir /data /cache \
    && chown user:user /data /cache

USER user
WORKDIR /data
# Kernels compiled for the machine outlive the container in this volume.
ENV XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1
VOLUME ["/data", "/cache"]
EXPOSE 8000
ENTRYPOINT ["mtp-export"]
CMD ["--help"]
