"""The JSON Schema of a configuration file, for editors: every field with its type, bounds, default and meaning."""

from __future__ import annotations

from typing import Any

from nnx_jax.params.run import RunSpec


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of RunSpec; families offer the kinds that are registered now."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunSpec.model_json_schema()}
