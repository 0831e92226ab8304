#!/usr/bin/env bash
# Train in containers on the hosts of a host file: one container per host, started over ssh, and ranks over ssh in them.
#
#   train_docker.sh HOSTFILE [OPTIONS] [-- ARGUMENTS OF hvd-train train]
#
#   train_docker.sh hostfiles/two_hosts -- digits --epochs 5
#   train_docker.sh hostfiles/two_hosts --volume /data:/data:ro -- imagenet-resnet50 --data-dir /data/imagenet
#
#   --elastic          let hosts die and come back (the folder for runs must then be on a shared file system)
#   --mpi              let the ranks communicate over MPI, not Gloo
#   --image IMAGE      the Dockerfile's image, which each host has or can pull (default: hvd_train)
#   --volume FROM:TO   a folder of each host, and where it is in the container (may be given more than once)
#   --runs DIR         the folder of each host for runs, in which user 1000 can write (default: runs, here); a missing
#                      one is made, and nobody else can write there
#   --env NAME         a variable of this environment that all ranks get (may be given more than once)
#   --port N           the port of the containers' sshd (default: 2222)
#   --dry-run          print the commands; run nothing
#
# Needs docker on each host, and ssh without a password from here to the others; start it on the first host. The
# containers share a pair of keys made for this job, and are removed however it ends, except by a kill -9 of this script:
# docker rm -f $(docker ps -aq --filter label=hvd_train). To use another engine, or more flags for its containers:
# CONTAINER_ENGINE=podman CONTAINER_FLAGS='--userns keep-id'.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=_launch.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/_launch.sh"

declare -A takes=([--elastic]=way='train_elastic.sh --hosts' [--mpi]=mpi=--mpi [--image]=image [--runs]=runs [--volume]=volumes+)
takes+=([--env]=passed_on+ [--port]=port#)
operand='' image=hvd_train runs=runs port=2222 volumes=() way=train_hostfile.sh mpi=''
read_options "$@"
[[ $way$mpi != train_elastic.sh*--mpi ]] || fail "--mpi does not go with --elastic: MPI cannot start again"
read_hosts "$operand"
read -r -a engine <<<"${CONTAINER_ENGINE:-docker}"
read -r -a flags <<<"${CONTAINER_FLAGS-}"
[[ -n $dry_run ]] || type -P "${engine[0]}" >/dev/null || fail "there is no ${engine[0]} on the PATH; CONTAINER_ENGINE names another"

job=hvd_train-$(uname -n)-$$
inside=/etc/hvd_train/ssh
runs=$(readlink -f -- "$(dirname -- "$runs")")/$(basename -- "$runs")
# The network of the hosts, because ranks connect to one another on any port. --ipc host, because NCCL needs more than
# the 64 MB of /dev/shm that a container has.
container=(--label hvd_train --network host --ipc host --cap-drop ALL --security-opt no-new-privileges)
container+=(--env "HVD_TRAIN_SSH_PORT=$port" --volume "$runs:/home/trainer/runs" "${volumes[@]}" "${flags[@]}")
if (($(num_gpus))); then container+=(--gpus all); fi
# The fast network for NCCL, which locks the memory that it reads.
if [[ -d /dev/infiniband ]]; then container+=(--device /dev/infiniband --ulimit memlock=-1); fi
keys=$(mktemp -d)
exec 3>&1

# on HOST COMMAND...: run a command on a host; in a dry run, print it.
on() {
  local host=$1 policy
  shift
  if ! is_here "$host"; then
    read -r -a policy < <(new_keys "$host") || true
    set -- ssh -o BatchMode=yes -o ConnectTimeout=5 "${policy[@]}" -- "$host" "$(quoted "$@")"
  fi
  if [[ -z $dry_run ]]; then "$@"; else shown "$@" >&3; fi
}

# make HOST NAME ARGUMENT...: create a container with the job's keys and host file in it; it does not run yet.
make() {
  local host=$1 name=$2
  shift 2
  # shellcheck disable=SC2016  # for the shell on that host
  on "$host" sh -c 'test -d "$0" || { install -d -m 755 "$0" && { test "$(id -u)" = 1000 || chown 1000 "$0" 2>/dev/null || setfacl -m u:1000:rwx "$0"; } || { rmdir "$0"; false; }; }' "$runs" ||
    fail "cannot make $runs on $host so that user 1000, as whom containers run, can write there: make it, or name another with --runs"
  on "$host" "${engine[@]}" create --name "$name" "${container[@]}" "$image" "$@" >/dev/null
  # Through a pipe, so that nobody can read the keys in a command line or in a container's environment.
  { [[ -n $dry_run ]] || tar -C "$keys" --owner 1000 --group 1000 --numeric-owner -c .; } |
    on "$host" "${engine[@]}" cp - "$name:$inside" >/dev/null
}

# start_host HOST: start a container there, and wait until its sshd takes ranks.
start_host() {
  make "$1" "$job-$1" host
  on "$1" "${engine[@]}" start "$job-$1" >/dev/null
  on "$1" "${engine[@]}" exec "$job-$1" timeout 20 sh -c 'until ssh localhost true; do sleep 0.2; done' >/dev/null
}

# shellcheck disable=SC2317  # the trap below calls it
clean_up() {
  wait # a container that is still being created could not be removed
  rm -rf "$keys"
  [[ -z $dry_run ]] || return 0
  for host in localhost "${others[@]}"; do
    if [[ $host == localhost ]]; then name=$job; else name=$job-$host; fi
    on "$host" "${engine[@]}" rm -f "$name" >/dev/null 2>&1 &
  done
  wait
}

trap clean_up EXIT
if [[ -z $dry_run ]]; then
  type -P ssh-keygen >/dev/null || fail "there is no ssh-keygen on the PATH: apt install openssh-client"
  ssh-keygen -q -t ed25519 -N '' -C "$job" -f "$keys/id_ed25519"
  tr ',' '\n' <<<"$host_list" | sed 's/:/ slots=/' >"$keys/hostfile"
fi
starting=()
for host in "${others[@]}"; do # on this host the ranks run in the launcher's container
  start_host "$host" &
  starting+=($!)
done
for index in "${!starting[@]}"; do
  wait "${starting[index]}" || fail "no container could be started on ${others[index]}; try: ssh ${others[index]} ${engine[*]} run --rm $image doctor"
done
container+=("${passed_on[@]}") # without values, which the engine finds in this environment; ssh takes them from there
read -r -a launcher <<<"$way $inside/hostfile $mpi"
make localhost "$job" "${launcher[@]}" "${passed_on[@]}" -- "${arguments[@]}"
on localhost "${engine[@]}" start --attach "$job" &
training=$! status=0
# Pass a signal on to the training, which commits; bash alone would hold it back until the training has ended.
trap 'kill -TERM "$training"' INT TERM HUP USR1
wait "$training" || status=$?
while kill -0 "$training" 2>/dev/null; do
  status=0
  wait "$training" || status=$?
done
exit "$status"
