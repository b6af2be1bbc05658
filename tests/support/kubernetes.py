"""Checks manifests against the schemas of Kubernetes, and those of custom resources.

A validator that only warns about custom resources does not see their wrong fields. So a custom
resource is checked against the `openAPIV3Schema` of its own definition (CRD).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

KUBERNETES = "1.37"

CRDS = "NBTRAIN_CRDS"
"""The variable with a folder of CRDs: of KubeRay 1.7 (``helm-chart/kuberay-operator/crds``) and of
Kubeflow Trainer 2.3 (``manifests/base/crds``), both Apache-2.0."""


def check_custom_resource(manifest: dict[str, Any], file_name: str) -> None:
    """Check a custom resource against its CRD, which also refuses unknown fields.

    Raises `jsonschema.ValidationError`. Skips the test without the CRD or without a package.
    """
    jsonschema = pytest.importorskip("jsonschema")
    path = Path(os.environ.get(CRDS, "/nonexistent"), file_name)
    if not path.exists():
        pytest.skip(f"{CRDS} names no folder with {file_name}")
    schema = _read_schema(path, manifest["kind"], manifest["apiVersion"].rpartition("/")[2])
    jsonschema.Draft7Validator(schema).validate(manifest)


@functools.cache
def _read_schema(path: Path, kind: str, version: str) -> dict[str, Any]:
    """Return the schema of a version in a CRD, so that it refuses fields that it does not list."""
    yaml = pytest.importorskip("yaml")
    definition = yaml.safe_load(path.read_text())["spec"]
    assert kind == definition["names"]["kind"]
    versions = {each["name"]: each["schema"] for each in definition["versions"]}
    schema: dict[str, Any] = versions[version]["openAPIV3Schema"]
    _refuse_unknown_fields(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # which the API server checks itself
    return schema


def _refuse_unknown_fields(schema: Any) -> None:
    """Change a schema so that it refuses fields that it does not list, as `kubectl` does."""
    if isinstance(schema, list):
        for each in schema:
            _refuse_unknown_fields(each)
    elif isinstance(schema, dict):
        is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
        if isinstance(schema.get("properties"), dict) and not is_open:
            schema.setdefault("additionalProperties", False)
        for each in schema.values():
            _refuse_unknown_fields(each)


def check_pod(spec: dict[str, Any]) -> None:
    """Check the spec of a pod against Kubernetes's own schema, which refuses unknown fields.

    Raises `kubernetes_validate.ValidationError`. Skips the test without that package.
    """
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    check_builtin(pod)


def check_builtin(manifest: dict[str, Any]) -> None:
    """Check an object of a kind that Kubernetes has itself, as `check_pod` does."""
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(manifest, KUBERNETES, strict=True)
