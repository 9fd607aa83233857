# Serves on a CPU: the packaged Triton, ONNX Runtime, and an engine that is built at the first start into a volume.
FROM python:3.11-slim-bookworm

# gcc compiles the attention kernel at the first start; make runs what a developer runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/llm
COPY . .

# One layer of packages, so that a container starts without installing anything.
ARG TORCH=torch==2.13.0
RUN make setup TORCH="$TORCH"

EXPOSE 8000 8001 8002
HEALTHCHECK --interval=5s --start-period=10m --retries=3 \
    CMD [".venv/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=3)"]
STOPSIGNAL SIGINT
ENTRYPOINT ["make", "serve", "HOST=0.0.0.0"]
