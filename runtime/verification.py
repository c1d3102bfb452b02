"""`cicada serve --verify`: every prepared model's hashes are checked before the first request."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from models.store import PreparedModel
from runtime.errors import Fault, Unavailable
from runtime.settings import variable

logger = logging.getLogger("cicada.verification")

_FINDINGS_STATUS: Final = 1


class Verification:
    """Runs `cicada inspect --verify` beside the event loop, and keeps what it found.

    A model with a finding is refused; prepared anew, it is another version and served again.
    """

    def __init__(self, weights: Path) -> None:
        self._weights = weights.absolute()
        self._faults: dict[tuple[str, str], str] = {}
        self._pending: str | None = "the weight files are being verified"

    def why_not_ready(self) -> str | None:
        return self._pending

    def require_sound(self, model: PreparedModel) -> None:
        """Raises Unavailable while nothing is known yet, Fault for a model that is not as prepared."""
        if self._pending is not None:
            raise Unavailable(self._pending)
        fault = self._faults.get((model.name, model.version))
        if fault is not None:
            raise Fault(f"model {model.name!r}: {fault}")

    async def run(self) -> None:
        """Verifies once; to be cancelled at the service's end."""
        try:
            found = await self._inspected()
        except (OSError, ValueError):
            logger.exception("not verified")
            found = None
        if found is None:
            self._pending = "the weight files could not be verified; the log says more"
            return
        versions = {model["name"]: model["version"] for model in found["models"]}
        for name, findings in found["faults"].items():
            for finding in findings:
                logger.error("damaged", extra={"model": name, "finding": finding})
            if name in versions:
                self._faults[name, versions[name]] = findings[0]
        logger.info("verified", extra={"models": len(versions), "damaged": len(found["faults"])})
        self._pending = None

    async def _inspected(self) -> Mapping[str, Any] | None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "runtime.cli", "inspect", "--verify", "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, variable("weights"): str(self._weights)},
        )
        try:
            printed, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode in {0, _FINDINGS_STATUS} and printed:
            document: dict[str, Any] = json.loads(printed)
            return document
        sentence = said.decode(errors="replace").strip()
        logger.error("not verified", extra={"status": process.returncode, "sentence": sentence})
        return None
