# `docker build -t hvd_train .`, about 10 minutes on 2 cores; then
#
#   docker run --rm hvd_train                            train the digits on 2 ranks: under a minute on 2 cores
#   docker run --rm -v "$PWD/runs:/home/trainer/runs" hvd_train train digits --epochs 3
#   docker run --rm --gpus all --ipc=host hvd_train      one rank per GPU; NCCL wants more /dev/shm than 64 MB
#   docker run --rm hvd_train doctor                     what this machine and this build can do
#   docker run --rm --read-only --cap-drop ALL --security-opt no-new-privileges hvd_train
#
# Several hosts: hvd-train launch --with docker, compose.yaml (two on one machine), horovodrun_scripts/mpijob.yaml.
#
# A plain Debian is enough: CUDA, NCCL and MPI come with the Python packages, the driver from the container runtime.
# Certificates or a package index of your own: mount them for the build (podman build --volume ...), keep them out of here.

ARG BASE=debian:bookworm-slim

# The Python packages that training needs. The two stages after this one start from it.
FROM ${BASE} AS packages
ENV PATH=/opt/hvd_train/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008  # Debian keeps only the newest version of a package: a pinned one is gone after the next fix
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hvd_train
WORKDIR /src
COPY requirements requirements
RUN pip install --require-hashes -r requirements/locks/run.txt -r requirements/locks/mpi.txt

# The compilers, from Debian and (nvcc) from the package index; only two wheels leave this stage.
FROM packages AS compile
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make python3-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --require-hashes -r requirements/locks/build.txt -r requirements/locks/nvcc.txt
COPY packaging/build_horovod.py packaging/horovod-project.cmake packaging/horovod-toolchain.cmake packaging/
COPY packaging/horovod_build packaging/horovod_build
COPY packaging/patches packaging/patches
COPY packaging/horovod_sources packaging/horovod_sources
RUN python packaging/build_horovod.py --wheel-dir /wheels
COPY pyproject.toml README.md LICENSE ./
COPY hvd_train hvd_train
RUN pip wheel --no-deps --no-build-isolation -w /wheels .

FROM packages AS environment
COPY --from=compile /wheels /wheels
# Nothing is linked from here on, so the static libraries (180 MB) can go.
RUN pip install --no-deps /wheels/*.whl && find /opt/hvd_train -name '*.a' -delete
# A bill of materials (CycloneDX) of the Python packages; scanners find Debian's in /var/lib/dpkg.
RUN python3 -m venv /sbom \
    && /sbom/bin/pip install --require-hashes -r requirements/locks/audit.txt \
    && /sbom/bin/cyclonedx-py environment /opt/hvd_train/bin/python --output-reproducible --output-file /opt/hvd_train/sbom.cdx.json \
    && rm -rf /sbom

# The image: Python, that environment, and ssh, which starts ranks on other hosts. Its server runs only in a container
# that is started as `host`; the keys that Debian makes for it are deleted.
FROM ${BASE}
LABEL org.opencontainers.image.title="hvd_train" \
      org.opencontainers.image.description="Exact, elastic data-parallel training of PyTorch models with Horovod" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server python3 tini \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 1000 --shell /bin/bash trainer \
    && install -d -o trainer -g trainer /home/trainer/runs /etc/hvd_train /etc/hvd_train/ssh \
    && install -d -m 700 -o trainer -g trainer /var/lib/hvd_train
COPY --from=environment /opt/hvd_train /opt/hvd_train
COPY horovodrun_scripts /opt/hvd_train/horovodrun_scripts
COPY hostfiles /opt/hvd_train/hostfiles
COPY packaging/image_entrypoint.sh /opt/hvd_train/bin/image_entrypoint.sh
COPY packaging/image_sshd_config /etc/hvd_train/sshd_config
COPY packaging/image_ssh_config /etc/ssh/ssh_config.d/hvd_train.conf
# The last two lines are for the NVIDIA container runtime: which GPUs, and nvidia-smi besides CUDA.
ENV PATH=/opt/hvd_train/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/trainer
# The folders that are written to; the rest may be read-only.
VOLUME ["/home/trainer/runs", "/tmp", "/var/lib/hvd_train"]
# The container ends with its training; this only checks that it can still start a program.
HEALTHCHECK --interval=60s --timeout=30s --start-period=30s CMD ["hvd-train", "--version"]
# tini passes on Ctrl-C and `docker stop`, and reaps the orphans of a killed rank.
ENTRYPOINT ["tini", "--", "image_entrypoint.sh"]
