# Sourced by scripts/setup, setup-vllm, setup-agents and setup-bridge, which set MAKE_TARGET: folders of packages outside of the checkout,
# shared by all checkouts with the same lock and Python; made once, then only read.
ENVS=${MEGATRON_RL_CORR_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_rl_corr}
SHOW_EVERY_S=10

say() { printf '[%3d s] %s\n' "$SECONDS" "$1"; }

fail() {
    printf '[%3d s] set-up failed: %s\n' "$SECONDS" "$1" >&2
    shift
    if [ $# -gt 0 ]; then printf '        %s\n' "$@" >&2; fi
    exit 1
}

# DEVICE_FOR_SETUP decides where it is given, as for an image, which is built without the GPU that it will run on.
has_gpu() {
    case ${DEVICE_FOR_SETUP:-} in
        gpu) return 0 ;;
        cpu) return 1 ;;
        "") ;;
        *) fail "DEVICE_FOR_SETUP is $DEVICE_FOR_SETUP" "give gpu or cpu, or leave it out: then a GPU is looked for" ;;
    esac
    compgen -G '/dev/nvidia[0-9]*' > /dev/null && return
    command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q '^GPU '
}

hash_of() { sha256sum "$1" | cut -c 1-12; }

# Waits until no other set-up writes in $ENVS; this one keeps the others out until it ends.
lock_packages() {
    mkdir -p "$ENVS"
    exec 9> "$ENVS/.lock"
    flock --nonblock 9 || { say "another set-up is at work in $ENVS; waiting for it"; flock 9; }
}

# make_room FOLDER GB: removes what was left half-made; fails where the disk has less than GB free.
make_room() {
    local free_gb
    free_gb=$(($(df --output=avail --block-size=1M "$ENVS" | tail -n 1) / 1024))
    [ "$free_gb" -ge "$2" ] || fail "$ENVS has $free_gb GB free, and $1 takes $2 GB" \
        "make room, or put it elsewhere: MEGATRON_RL_CORR_ENVS=/path make $MAKE_TARGET"
    rm -rf "$1"
}

# progress LOG: what pip is at, the package it fetches or how many of install_packages' total lie in its folder.
progress() {
    if grep -q '^Installing collected packages' "$1"; then
        # With --target pip fills the folder at its very end.
        [ -d "$packages" ] || { echo "unpacking $total packages"; return; }
        echo "unpacking: $(compgen -G "$packages/*.dist-info" | grep -cv '/pip-') of $total packages"
    else
        grep -E '^ *(Collecting|Downloading|Processing|Using cached)' "$1" | tail -n 1 | awk '{print $1, $2}' \
            | sed 's|file://.*/||; s|/.*/||' | cut -c 1-90
    fi
}

# run_pip PYTHON LOG SHOW [PIP ARGUMENTS]: installs with pip's noise in the log, and says now and then what SHOW LOG
# prints. Its status is pip's.
run_pip() {
    local python=$1 log=$2 show=$3 shown=$SECONDS pip
    shift 3
    env -u PYTHONPATH -u PYTHONHOME -u PIP_TARGET -u PIP_USER "$python" -m pip install --no-input \
        --disable-pip-version-check --progress-bar off --no-deps "$@" >> "$log" 2>&1 &
    pip=$!
    trap 'kill $pip 2> /dev/null || true' EXIT
    while kill -0 $pip 2> /dev/null; do
        if [ $((SECONDS - shown)) -ge $SHOW_EVERY_S ]; then
            shown=$SECONDS
            say "  $($show "$log")"
        fi
        sleep 0.5
    done
    trap - EXIT
    wait $pip
}

# install_packages PYTHON LOCK LOG PACKAGES [PIP OPTIONS]: everything that the lock names and that is published as a wheel;
# PACKAGES is the folder that pip fills.
install_packages() {
    local python=$1 lock=$2 log=$3 packages=$4 started=$SECONDS total
    shift 4
    # What is left out needs torch to be built: scripts/gpu_setup.sh compiles it afterwards.
    grep -v '^transformer_engine_torch==' "$lock" > "$log.wheels"
    total=$(grep -c '^[^#].*==' "$log.wheels")
    say "$total packages of $lock; pip's log: $log"
    run_pip "$python" "$log" progress --requirement "$log.wheels" "$@" \
        || fail "pip could not install $lock; its log $log ends with:" "$(tail -n 25 "$log")" \
            "run make $MAKE_TARGET again once the cause is gone; nothing half-made is ever used"
    rm "$log.wheels"
    say "installed in $((SECONDS - started)) s"
}
