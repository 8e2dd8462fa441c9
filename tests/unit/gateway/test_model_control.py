import asyncio
from pathlib import Path
from typing import Any

from gateway.model_control import ModelControl
from gateway.routing import Routing
from shared.errors import UnknownModel
from shared.settings import Settings

LIMIT_S = 5.0


async def test_several_who_ask_for_an_unknown_model_at_once_are_all_told_so_and_its_name_is_forgotten(
    tmp_path: Path,
) -> None:
    nobody: Any = None
    control = ModelControl(Settings(repository=tmp_path), Routing([]), nobody)
    async with asyncio.timeout(LIMIT_S):
        outcomes = await asyncio.gather(*(control.load("absent") for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UnknownModel] * 3
    assert len(control._locks) == 0
