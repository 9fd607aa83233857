# Builds and serves engines on an NVIDIA GPU: NVIDIA's Triton, TensorRT, torch with CUDA.
#
# The py3 image brings tritonserver on the PATH, its Python backend for Ubuntu's Python 3.12, CUDA, and TensorRT's C++ library for its
# own TensorRT backend. That backend is not used: the model runs in the Python backend, with the TensorRT of the Python package below,
# which brings its own library. So the two need not be of one version, and plans are built and loaded by the same package.
ARG TRITON=25.11
FROM nvcr.io/nvidia/tritonserver:${TRITON}-py3

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && (id -u triton-server > /dev/null 2>&1 || useradd --create-home --uid 1000 triton-server) \
    && mkdir -p /engines \
    && chown 1000 /engines

WORKDIR /srv/llm
COPY --chown=1000 . .
RUN chown 1000 /srv/llm
USER 1000
ENV HOME=/srv/llm

# One layer of packages, so that a container starts without installing anything. TORCH must be for the driver's CUDA: the default
# range takes PyPI's newest build.
ARG TORCH="torch>=2.6"
ARG TENSORRT="tensorrt>=10.13,<11"
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir "$TORCH" "$TENSORRT" \
    && .venv/bin/pip install --no-cache-dir -e '.[runtime,build,client,demo,tensorrt-rtx]'

# The engine is made by the compose file's one-shot service, and found in this volume.
VOLUME /engines
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=3 \
    CMD [".venv/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=3)"]
STOPSIGNAL SIGINT
ENTRYPOINT [".venv/bin/python"]
CMD ["scripts/serve.py", "--engine", "/engines/llm", "--host", "0.0.0.0"]
