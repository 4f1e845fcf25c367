# An engine's image with kvconnector in it. BASE is the engine's own image; UCX is by the CUDA version of the driver.
#
#   docker build --build-arg BASE=vllm/vllm-openai:v0.33.0 --build-arg UCX=ucx-cu13 -t vllm-with-kvconnector .
#
# The C library is compiled in an image of its own, by ziglang, for glibc 2.28 and newer: BASE needs no compiler, and gets none.
ARG BASE=python:3.12-slim
FROM python:3.12-slim AS build
COPY . /src
RUN KVCONNECTOR_WHEEL_MACHINE="$(uname -m)" python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${BASE}
ARG UCX=ucx-cu12
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir "$(echo /wheels/*.whl)[cli,checksum,metrics,${UCX}]" && kvconnector plan --help >/dev/null
