"""Complete a torch for the CPU where only wheels for CUDA can be had: 0.5–0.9 GB, not 4.

    pip install --no-deps torch==2.7.1
    python tests/tools/cpu_torch.py

In the place of NVIDIA's packages come libraries of a few kilobytes in which every function answers
that there is no GPU. Needs gcc and binutils, on Linux.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path

DEVICELESS = 100
"""cudaErrorNoDevice"""

NVIDIA = re.compile(r"lib(cu|nv|nccl)")
"""Names of the libraries to stand in for."""

DRIVER = "libcuda.so.1"
"""Never stood in for: nobody loads it without a GPU, and nbtrain looks whether it is loaded."""

PLAIN = (
    "filelock",
    "typing-extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "setuptools<82",
    "numpy",
)


def main() -> None:
    torch = metadata.distribution("torch")
    (entry,) = [file for file in torch.files or () if file.match("torch-*.dist-info/METADATA")]
    path = Path(str(torch.locate_file(entry)))
    unwanted = r"^Requires-Dist: (nvidia|triton|cuda)[^\n]*\n"
    text = re.sub(unwanted, "", path.read_text("utf-8"), flags=re.M)
    path.unlink()  # uv gives environments links to the files of its cache
    path.write_text(text, "utf-8")
    pip("install", *PLAIN)
    stand_in(Path(str(torch.locate_file("torch/lib"))))
    subprocess.run([sys.executable, "-c", "import torch; print(torch.__version__)"], check=True)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q"], check=True)


def stand_in(folder: Path) -> None:
    """Write what torch's libraries need of NVIDIA's, with the names and versions they ask for."""
    libraries = sorted(folder.glob("*.so*"))
    defined = {name for path in libraries for name in names(path, "--defined-only")}
    wanted: dict[str, set[str]] = defaultdict(set)  # a version of a symbol: the symbols
    for path in libraries:
        for symbol in names(path, "--undefined-only") - defined:
            name, _, version = symbol.partition("@")
            wanted[version].add(name)
    plain = {name for name in wanted[""] if re.match("cu|nv|nccl", name)}
    for library, versions in needed(libraries).items():
        functions = {version: wanted[version] for version in versions}
        write(folder / library, functions, plain if library.startswith("libcudart") else set())


def names(path: Path, which: str) -> set[str]:
    """Return the dynamic symbols of a library, each with its version if it is undefined."""
    lines = output("nm", "-D", "--with-symbol-versions", which, str(path)).splitlines()
    symbols = {line.split()[-1] for line in lines if line.split()[-2] not in ("w", "v")}
    if which == "--defined-only":
        return {symbol.partition("@")[0] for symbol in symbols}
    return symbols


def needed(libraries: list[Path]) -> dict[str, set[str]]:
    """Return NVIDIA's libraries that others need, each with the versions asked of it."""
    versions: dict[str, set[str]] = defaultdict(set)
    for path in libraries:
        for name in re.findall(r"NEEDED.*\[(.*?)\]", output("readelf", "-dW", str(path))):
            _ = versions[name]
        for file, entries in re.findall(
            r"File: (\S+)((?:.*\n.*Name: .*)+)", output("readelf", "-VW", str(path))
        ):
            versions[file].update(re.findall(r"Name: (\S+)", entries))
    own = {path.name for path in libraries} | {DRIVER}
    return {
        name: found for name, found in versions.items() if NVIDIA.match(name) and name not in own
    }


def write(path: Path, functions: dict[str, set[str]], plain: set[str]) -> None:
    source, script = path.with_suffix(".stand-in.c"), path.with_suffix(".stand-in.map")
    every = sorted(plain.union(*functions.values()))
    source.write_text("".join(map(function, every)))
    groups = {v: "".join(f"{name}; " for name in names) or "*; " for v, names in functions.items()}
    script.write_text("".join(f"{v} {{ global: {text}}};\n" for v, text in groups.items()))
    versions = [f"-Wl,--version-script={script}"] if functions else []
    soname = f"-Wl,-soname,{path.name}"
    compiler = ("gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(path))
    output(*compiler, str(source), soname, *versions)
    source.unlink()
    script.unlink()


def function(name: str) -> str:
    if re.search("(String|Name)$", name):
        return f'const char *{name}() {{ return "no GPU"; }}\n'
    return f"int {name}() {{ return {DEVICELESS}; }}\n"


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
