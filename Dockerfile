# The environment of `make setup` on a machine with GPUs, and this checkout in it:
#   docker build -t megatron_rl_corr .
#   docker run --gpus all --ipc host --ulimit memlock=-1 \
#       -v "$PWD/models:/opt/megatron_rl_corr/models" -v "$PWD/data:/opt/megatron_rl_corr/data" \
#       -v "$PWD/runs:/opt/megatron_rl_corr/runs" -it megatron_rl_corr
# CUDA comes with requirements/gpu.lock; of this base only the variables count that let containers see the GPUs.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ git libnuma1 make python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# No GPU is seen while an image is built, so the lock is named.
ENV DEVICE_FOR_SETUP=gpu \
    MEGATRON_RL_CORR_ENVS=/opt/environments \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/megatron_rl_corr
COPY . .
RUN make setup
ENV PATH=/opt/megatron_rl_corr/.venv/bin:$PATH \
    CUDA_HOME=/opt/megatron_rl_corr/.venv/cuda
CMD ["bash"]
