# shellcheck shell=bash disable=SC2034  # the scripts read what the functions set
# Functions for the scripts beside it: options, errors of one line, the project's programs, hosts, dry runs.

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

# read_options ARGUMENT...: read a script's arguments up to --, and set `arguments` to the others. The table `takes` has
# the options of the script: `a=b` sets variable a to b, `a` to the next argument, `a#` to a number, and `a+` adds both
# the option and the next argument to the array a. An `operand` that is set and empty becomes the argument without a -.
read_options() {
  local sets operand_is=${operand-none}
  dry_run='' passed_on=()
  while (($#)) && [[ $1 != -- ]]; do
    sets=${takes[${1:-none}]-}
    case $1 in
      -h | --help) usage ;;
      --dry-run) sets=dry_run=yes ;;
      --env) [[ -z ${2-} ]] || pass_on "$2" ;;
    esac
    if [[ $sets == *=* ]]; then
      printf -v "${sets%%=*}" %s "${sets#*=}"
    elif [[ -n $sets ]]; then
      [[ -n ${2-} ]] || fail "$1 needs a value; see --help"
      [[ $sets != *'#' || $2 =~ ^[1-9][0-9]{0,4}$ ]] || fail "$1 takes a number from 1, not '$2'"
      if [[ $sets == *+ ]]; then
        local -n list=${sets%+}
        list+=("$1" "$2")
      else
        printf -v "${sets%'#'}" %s "$2"
      fi
      shift
    else
      [[ $1 != -* && -z $operand_is ]] ||
        fail "unknown argument '$1'; what is for hvd-train train goes after --; see --help"
      operand=$1 operand_is=$1
    fi
    shift
  done
  arguments=("${@:2}")
}

# pass_on NAME: let the ranks on other hosts have one more variable of this environment. Its value must not be typed:
# every user can read command lines.
pass_on() {
  [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--env takes the name of a variable, whose value is in the environment"
  printenv "$1" >/dev/null || fail "--env $1: there is no such variable in the environment"
  export HVD_TRAIN_ENV=${HVD_TRAIN_ENV:+$HVD_TRAIN_ENV,}$1
}

# find_programs: put the project's own environment in front of the PATH if horovodrun or hvd-train is not on it. Set
# `python` to the Python of hvd-train and `command` to what a rank runs: hvd-train train, or a script of one's own.
# Let horovodrun print the output of rank 0 as it is, all else with its rank.
find_programs() {
  local project program
  export HVD_TRAIN_OUTPUT_PREFIX=${HVD_TRAIN_OUTPUT_PREFIX-errors}
  if ! command -v horovodrun >/dev/null || ! command -v hvd-train >/dev/null; then
    project=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
    project_bin=$project/.venv/bin
    for program in horovodrun hvd-train; do
      [[ -x $project_bin/$program ]] ||
        fail "there is no $program on the PATH or in $project_bin; to set it up: make -C $(printf %q "$project") env"
    done
    PATH=$project_bin:$PATH
  fi
  python=$(dirname -- "$(type -P hvd-train)")/python
  [[ -x $python ]] || python=python3
  command=(hvd-train train "${arguments[@]}")
  [[ ${arguments[0]-} != *.py ]] || command=("$python" "${arguments[@]}")
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

# shown WORD...: print a command as a user can type it.
shown() {
  local line
  printf -v line ' %q' "$@"
  printf '%s\n' "${line# }"
}

# start COMMAND...: become the command, or in a dry run print it.
start() {
  [[ -n $dry_run ]] || exec "$@"
  # shellcheck disable=SC2016  # "$PATH" is for the shell that the line is typed into
  if [[ -n ${project_bin-} ]]; then printf 'PATH=%q:"$PATH" ' "$project_bin"; fi
  if [[ -n ${HVD_TRAIN_ENV-} ]]; then printf 'HVD_TRAIN_ENV=%q ' "$HVD_TRAIN_ENV"; fi
  shown "$@"
}

# new_keys HOST...: print the option of ssh that takes the key of a new host, not of one that has changed, unless the
# user's ssh configuration decides for one of these hosts.
new_keys() {
  local one
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

# list_hosts FILE [NAME]: print the hosts of a file, which errors call NAME, as `HOST:SLOTS`. Takes the forms that the
# project's Horovod takes: `h`, `h:2`, `h slots=2 max_slots=4`. No host begins with -: ssh would take it as an option.
list_hosts() {
  local line number=0 form='^([A-Za-z0-9_.][A-Za-z0-9_.-]*)(:([0-9]{1,5}))?'
  form+='([[:space:]]+slots[[:space:]]*=[[:space:]]*([0-9]{1,5}))?'
  form+='([[:space:]]+max[-_]slots[[:space:]]*=[[:space:]]*[0-9]+)?[[:space:]]*$'
  [[ -r $1 && ! -d $1 ]] || fail "there is no host file $1"
  while read -r line || [[ -n $line ]]; do
    number=$((number + 1)) line=${line%%#*}
    [[ $line =~ [^[:space:]] ]] || continue
    [[ $line =~ $form ]] || fail "${2-$1}, line $number: \"${line%$'\r'}\" is not of the form \"NAME slots=N\""
    echo "${BASH_REMATCH[1]}:$((10#${BASH_REMATCH[5]:-${BASH_REMATCH[3]:-1}}))"
  done <"$1"
}

# read_hosts FILE: set num_ranks to the slots of all hosts, host_list to `NAME:SLOTS,...`, and others to the hosts but
# this one. The ranks get the list, too, so one that waits for another can say on which host that is.
read_hosts() {
  local entry entries
  [[ -n $1 ]] || fail "which host file? Such as: ${0##*/} hostfiles/localhost -- digits"
  entries=$(list_hosts "$1")
  num_ranks=0 others=()
  for entry in $entries; do
    num_ranks=$((num_ranks + ${entry#*:}))
    is_here "${entry%:*}" || others+=("${entry%:*}")
  done
  ((num_ranks > 0)) || fail "$1 has no slots: one host per line, 'NAME slots=N'"
  host_list=${entries//$'\n'/,}
}

# is_here NAME: succeed if NAME is this host.
is_here() {
  case $1 in localhost | 127.* | "$(uname -n)" | "$(hostname -f 2>/dev/null)") return 0 ;; esac
  return 1
}

# check_hosts FILE: fail unless each of the others lets us in by ssh without a password and has hvd-train in the same
# place as here. All hosts are asked at once; horovodrun itself would try a dead one for a while.
check_hosts() {
  local problems program
  program=$(type -P hvd-train)
  problems=$(for host in "${others[@]}"; do check_host "$host" "$program" "$1" & done && wait)
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
  elif ((code == 255)); then
    echo "$1 does not let us in by ssh without a password (${reply##*$'\n'}); try \`ssh $1 true\`, or take it out of $3"
  elif ((code)); then
    echo "$1 has no $2: set up the same environment there, or put it on a file system that all hosts share"
  fi
}

# find_open_mpi PROGRAM: set open_mpi to an env command that tells an Open MPI 4 in the Python environment of PROGRAM
# where its daemon and files are on other hosts: the PATH of ssh lacks that environment.
find_open_mpi() {
  local folder
  folder=$(dirname -- "$(type -P "$1")")
  [[ -x $folder/orted && -x $folder/python ]] || return 0
  [[ -n ${OPAL_PREFIX-} ]] || open_mpi+=("OPAL_PREFIX=$(dirname -- "$folder")")
  [[ -n ${OMPI_MCA_orte_launch_agent-} ]] || open_mpi+=("OMPI_MCA_orte_launch_agent=$(quoted "$folder/orted")")
  if ((${#open_mpi[@]})); then open_mpi=(env "${open_mpi[@]}"); fi
}
