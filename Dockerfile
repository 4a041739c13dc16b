# The server with the embedded default, on a CPU. Mount a checkpoint and name it with --target to serve another one.
#   docker build -t outrider .  &&  docker run --rm -p 127.0.0.1:8000:8000 outrider
FROM python:3.12-slim

# torch's CPU builds; PyPI's bring CUDA libraries of several gigabytes
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    OUTRIDER_CACHE=/cache PYTHONUNBUFFERED=1

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --constraint constraints.txt ".[demo,server]" \
    && useradd --create-home --uid 10001 outrider \
    && install --directory --owner outrider /cache

USER outrider
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM

# A container that still boots answers 503, hence the long start period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# Only the container's own network sees 0.0.0.0; what the host lets in is up to `docker run -p`.
ENTRYPOINT ["outrider", "serve", "--host", "0.0.0.0"]
