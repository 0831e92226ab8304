#!/usr/bin/env bash
# What `docker run IMAGE ARGUMENTS` does; the Dockerfile has examples.
#
#   (nothing)             train the digits, one rank per GPU or 2 on the cores
#   train ARGUMENTS       hvd-train train ARGUMENTS, on as many ranks
#   doctor, evaluate ...  any other command of hvd-train
#   PROGRAM ARGUMENTS     any program of the image: horovodrun, python, bash, train_local.sh -n 4 -- digits
#   host                  a host for ranks of other containers: sshd on port 2222 (HVD_TRAIN_SSH_PORT), for keys alone
#   keys                  make a pair of keys in /etc/hvd_train/ssh, unless there is one
#
# The containers of a cluster share that pair, mounted there: it lets each log in to the others and identifies them.
# Its private key is `id_ANYTHING`.

set -euo pipefail

PATH=/opt/hvd_train/horovodrun_scripts:$PATH
shared=/etc/hvd_train/ssh
# In the image and this user's alone: in Apptainer, /tmp is the machine's, and another user could make it first.
own=/var/lib/hvd_train/ssh # also in image_sshd_config and image_ssh_config
port=${HVD_TRAIN_SSH_PORT:-2222}

fail() {
  printf 'hvd_train image: %s\n' "$*" >&2
  exit 2
}

shared_key() {
  find -L "$shared" -maxdepth 1 -name 'id_*' ! -name '*.pub' -print -quit 2>/dev/null
}

# take_key KEY: copy it for this user alone, as ssh demands; both ends of every connection are known by it.
take_key() {
  local public
  install -d -m 700 "$own" 2>/dev/null || fail "user $(id -u) cannot write to ${own%/*}: run it as user 1000, or mount a folder there"
  install -m 600 "$1" "$own/key" || fail "$1 cannot be read by user $(id -u)"
  public=$(ssh-keygen -y -P '' -f "$own/key") || fail "$1 is not a private key without a passphrase"
  printf '%s\n' "$public" >"$own/key.pub"
  printf '* %s\n' "$public" >"$own/known_hosts"
  printf '%s\n' >"$own/config" "Port $port" "IdentityFile $own/key" BatchMode\ yes StrictHostKeyChecking\ yes \
    "GlobalKnownHostsFile $own/known_hosts" UserKnownHostsFile\ /dev/null UpdateHostKeys\ no LogLevel\ ERROR
}

# Where the root file system is read-only, horovodrun and others find another place for their caches, and so do ranks in
# the containers of other hosts, where the same holds.
if [[ ! -w $HOME ]]; then
  HOME=$(mktemp -d)
  export HOME HVD_TRAIN_ENV=${HVD_TRAIN_ENV:+$HVD_TRAIN_ENV,}HOME
fi
key=$(shared_key)
if [[ -n $key && ${1-} != keys ]]; then take_key "$key"; fi
if (($# == 0)); then set -- train digits; fi
case $1 in
  host)
    [[ -n $key ]] || fail "host: there is no key in $shared; mount one there: docker run --rm -v KEYS:$shared IMAGE keys"
    exec /usr/sbin/sshd -D -e -p "$port" -f /etc/hvd_train/sshd_config
    ;;
  keys)
    [[ -n $key ]] || ssh-keygen -q -t ed25519 -N '' -C hvd_train -f "$shared/id_ed25519" ||
      fail "keys: user $(id -u) cannot write to $shared"
    exit
    ;;
  train)
    shift
    set -- hvd-train launch -- train "$@"
    ;;
  *) if [[ $1 == -* ]] || [[ -z $(type -P -- "$1") ]]; then set -- hvd-train "$@"; fi ;;
esac
exec "$@"
