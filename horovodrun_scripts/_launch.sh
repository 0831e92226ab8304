# shellcheck shell=bash
# Functions for the scripts beside it: help, errors of one line, the project's programs on the PATH, dry runs.

# usage: print the comment that opens the script, and exit.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
}

# fail MESSAGE: print one line on stderr, and exit with code 2.
fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 2
}

# find_programs: put the project's own environment in front of the PATH where horovodrun or hvd-train is not on it. Also
# ask horovodrun to print rank 0's standard output as it is, and all else with its rank in front.
find_programs() {
  export HVD_TRAIN_OUTPUT_PREFIX=${HVD_TRAIN_OUTPUT_PREFIX-errors}
  if command -v horovodrun >/dev/null && command -v hvd-train >/dev/null; then return; fi
  local project program
  project=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
  project_bin=$project/.venv/bin
  for program in horovodrun hvd-train; do
    [[ -x $project_bin/$program ]] ||
      fail "there is no $program on the PATH or in $project_bin; to set it up: make -C $(printf %q "$project") env"
  done
  PATH=$project_bin:$PATH
}

# quoted WORD...: print the words for the command line of any shell. Bash's own %q is for bash: under LC_ALL=C it writes
# letters outside ASCII as $'...', which a plain sh, here or on another host, takes for a name.
quoted() {
  local word line='' quote="'" escaped="'\\''"
  for word; do
    if [[ $word =~ ^[0-9a-zA-Z_./:=@%+,-]+$ ]]; then line+=" $word"; else line+=" '${word//$quote/"$escaped"}'"; fi
  done
  printf '%s\n' "${line# }"
}

# show COMMAND...: print the command as a user can type it, and exit.
show() {
  local line
  printf -v line ' %q' "$@"
  # shellcheck disable=SC2016  # "$PATH" is for the shell that the line is typed into
  if [[ -n ${project_bin-} ]]; then printf 'PATH=%q:"$PATH" ' "$project_bin"; fi
  if [[ -n ${HVD_TRAIN_ENV-} ]]; then printf 'HVD_TRAIN_ENV=%q ' "$HVD_TRAIN_ENV"; fi
  printf '%s\n' "${line# }"
  exit 0
}

# pass_on NAME: let the ranks on other hosts have one more variable of this environment. Its value must not be typed:
# every user can read command lines.
pass_on() {
  [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--env takes the name of a variable, whose value is in the environment"
  printenv "$1" >/dev/null || fail "--env $1: there is no such variable in the environment"
  export HVD_TRAIN_ENV=${HVD_TRAIN_ENV:+$HVD_TRAIN_ENV,}$1
}

# is_passed_on NAME: succeed where ranks on other hosts get this variable of the environment. The patched Horovod has the
# same list, in packaging/horovod_sources/horovod/runner/util/worker_environment.py; a test compares them.
is_passed_on() {
  case $1 in
    *CUDA_VISIBLE_DEVICES) return 1 ;;
    PATH | LD_LIBRARY_PATH | LD_PRELOAD | TMPDIR | XDG_CACHE_HOME | VIRTUAL_ENV | CONDA_PREFIX) ;;
    OPAL_PREFIX | CC | CXX | GLIBC_TUNABLES | LANG | LANGUAGE | TZ) ;;
    SSL_CERT_FILE | SSL_CERT_DIR | REQUESTS_CA_BUNDLE | CURL_CA_BUNDLE) ;;
    http_proxy | https_proxy | ftp_proxy | all_proxy | no_proxy) ;;
    HTTP_PROXY | HTTPS_PROXY | FTP_PROXY | ALL_PROXY | NO_PROXY) ;;
    HOROVOD_* | HVD_TRAIN_* | NCCL_* | GLOO_* | CUDA_* | CUDNN_* | CUBLAS_* | NVIDIA_*) ;;
    PYTHON* | TORCH* | PYTORCH_* | TRITON_* | OMP_* | GOMP_* | KMP_* | MKL_* | OPENBLAS_* | MALLOC_* | LC_*) ;;
    OMPI_MCA_* | PRTE_MCA_* | PMIX_MCA_* | UCX_* | FI_* | I_MPI_* | MPICH_*) ;;
    *) [[ ,${HVD_TRAIN_ENV-}, == *",$1,"* ]] || return 1 ;;
  esac
}

# new_keys HOST...: print the option of ssh that takes the key of a host that is new, unless the user's ssh configuration
# has its own word about one of these hosts. A key that has changed is refused in any case.
new_keys() {
  local one
  (($#)) || return 0
  for one; do
    [[ $(ssh -G -- "$one" 2>/dev/null) == *$'\n'stricthostkeychecking\ ask$'\n'* ]] || return 0
  done
  printf '%s\n' '-o StrictHostKeyChecking=accept-new'
}

# num_gpus: print the number of GPUs that this process may use.
num_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^-/,$d' | grep -c . || true
  else
    { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU ' || true
  fi
}

# default_num_ranks: print one per GPU; without a GPU 2 (more gain little on one machine), or 1 on a single core.
default_num_ranks() {
  local gpus cores
  gpus=$(num_gpus)
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc would take OpenMP's limits for cores
  echo $((gpus > 0 ? gpus : cores < 2 ? cores : 2))
}

# parse_host LINE: set host and slots from a line of a host file without its comment; return 1 where it names no host.
# Takes the forms that the project's Horovod takes: `h`, `h:2`, `h slots=2 max_slots=4`. No name begins with -: ssh would
# take it as an option.
parse_host() {
  local form='^([A-Za-z0-9_.][A-Za-z0-9_.-]*)(:([0-9]{1,5}))?([[:space:]]+slots[[:space:]]*=[[:space:]]*([0-9]{1,5}))?'
  form+='([[:space:]]+max[-_]slots[[:space:]]*=[[:space:]]*[0-9]+)?[[:space:]]*$'
  [[ $1 =~ $form ]] || return 1
  # shellcheck disable=SC2034  # the caller reads it
  host=${BASH_REMATCH[1]} slots=${BASH_REMATCH[5]:-${BASH_REMATCH[3]:-1}}
}

# read_hosts FILE: set num_ranks to the slots of all hosts, and host_list to `NAME:SLOTS,...`. The ranks get the list as
# well, so one that waits for another can say on which host that is.
read_hosts() {
  local line number=0 host slots
  [[ -f $1 && -r $1 ]] || fail "there is no host file $1"
  num_ranks=0 host_list=''
  while read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    [[ ${line%%#*} =~ [^[:space:]] ]] || continue
    parse_host "${line%%#*}" || fail "$1, line $number: '${line%$'\r'}' is not of the form 'NAME slots=N'"
    num_ranks=$((num_ranks + 10#$slots))
    host_list+=${host_list:+,}$host:$((10#$slots))
  done <"$1"
  ((num_ranks > 0)) || fail "$1 has no slots: one host per line, 'NAME slots=N'"
  export HVD_TRAIN_HOSTS=$host_list
}

# is_here NAME: succeed where NAME is this host.
is_here() {
  case $1 in localhost | 127.* | "$(uname -n)" | "$(hostname -f 2>/dev/null)") return 0 ;; esac
  return 1
}

# check_hosts FILE: fail unless each other host of host_list lets us in by ssh without a password and has hvd-train in
# the same place as here. All hosts are asked at once; horovodrun itself would try a dead one for a while.
check_hosts() {
  local path entry problems
  path=$(type -P hvd-train)
  problems=$(
    for entry in ${host_list//,/ }; do
      if is_here "${entry%:*}"; then continue; fi
      check_host "${entry%:*}" "$path" "$1" &
    done
    wait
  )
  [[ -z $problems ]] || fail "$problems"
}

# check_host NAME PROGRAM FILE: print what is wrong with the host; FILE is the host file to name in the message.
check_host() {
  local reply code=0 policy
  read -r -a policy < <(new_keys "$1") || true
  reply=$(ssh -n -o BatchMode=yes -o ConnectTimeout=5 "${policy[@]}" -- "$1" test -x "$(quoted "$2")" 2>&1) || code=$?
  if ((code == 255)) && [[ $reply == *'HOST IDENTIFICATION HAS CHANGED'*'verification failed'* ]]; then
    echo "$1 has another ssh host key than the known one, so it may be another machine; if you know why," \
      "forget the old key: ssh-keygen -R $1"
  elif ((code == 255)) && [[ $reply == *'Host key verification failed'* ]]; then
    echo "$1 has an ssh host key that is not known here, and your ssh configuration takes no new ones; to compare and" \
      "accept it: ssh -o StrictHostKeyChecking=ask $1 true"
  elif ((code == 255)); then
    echo "$1 does not let us in by ssh without a password (${reply##*$'\n'}); try \`ssh $1 true\`, or take it out of $3"
  elif ((code)); then
    echo "$1 has no $2: set up the same environment there, or put it on a file system that all hosts share"
  fi
}

# find_open_mpi PROGRAM: set open_mpi to an env command that tells an Open MPI 4 which lies beside PROGRAM, in a Python
# environment, where its daemon and files are on other hosts. Over ssh the PATH there lacks that environment, and the
# wrappers set OPAL_PREFIX only for themselves. An Open MPI of the system needs none of this.
find_open_mpi() {
  local folder
  folder=$(dirname -- "$(type -P "$1")")
  open_mpi=()
  if [[ -x $folder/orted && -x $folder/python ]]; then
    [[ -n ${OPAL_PREFIX-} ]] || open_mpi+=("OPAL_PREFIX=$(dirname -- "$folder")")
    [[ -n ${OMPI_MCA_orte_launch_agent-} ]] || open_mpi+=("OMPI_MCA_orte_launch_agent=$(quoted "$folder/orted")")
    # shellcheck disable=SC2034  # the caller reads it
    if ((${#open_mpi[@]})); then open_mpi=(env "${open_mpi[@]}"); fi
  fi
}
