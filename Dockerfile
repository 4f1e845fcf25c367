# An engine's image with kvconnector in it. BASE is the engine's own image; UCX is by the CUDA version of the driver.
#
#   docker build --build-arg BASE=vllm/vllm-openai:v0.33.0 --build-arg UCX=ucx-cu13 -t vllm-with-kvconnector .
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG UCX=ucx-cu12
COPY . /opt/kvconnector
RUN python3 -m pip install --no-cache-dir "/opt/kvconnector[cli,checksum,metrics,${UCX}]" && kvconnector plan --help >/dev/null
