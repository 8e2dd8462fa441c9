"""What concerns all gateways of one server, whichever of them was asked: metrics, `/debug`, loading and unloading."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gateway.model_control import READ_LIMIT_S, ModelControl
from gateway.name_locks import NameLocks
from gateway.orders import Order, Promote, RollBack, Standing
from gateway.peers import (
    Abandon,
    Adopt,
    Alive,
    Ask,
    Changes,
    Control,
    News,
    Ordered,
    PeerGone,
    PeerServer,
    Prepare,
    Verb,
    ask,
)
from gateway.shielded import Shielded
from gateway.state import ModelState
from gateway.together import SHOW_LIMIT_S, Together
from gateway.versions import LOAD_LIMIT_S
from shared.errors import HeadraceError, NotReady, UnknownModel
from shared.logs import get_logger
from shared.traffic import Action, Traffic

CONTROL_LIMIT_S = 2 * LOAD_LIMIT_S + 10
"""A load here, and then at the others, side by side."""
FOLLOW_LIMIT_S = 1.0
"""How long an order that needs no load waits for the others: a rollback must not take longer than a second."""
HURRY_LIMIT_S = 0.2
"""In which a gateway that is to lead a rollback must say that it lives; the disk's share comes on top of that."""
ADOPT_LIMIT_S = 2.0
"""How long a new gateway waits to hear what has been loaded and unloaded before it came."""

History: TypeAlias = list[dict[str, Any]]
_NOT_TWICE: dict[type[Order], Action] = {Promote: "promote", RollBack: "rollback"}
"""What each of these orders is in the history."""

log = get_logger()


class Everywhere(Together):
    """One gateway's view of all of them. Event loop only.

    Loads and unloads go through the gateway with the lowest number that lives, one after another for each model, so
    that all end with the same: it applies them to itself first, then tells the others. Who starts later asks for them.
    """

    def __init__(self, index: int, sockets: list[Path], control: ModelControl) -> None:
        """`sockets`: where each gateway is asked, this one's at `index`."""
        super().__init__(index, sockets, control)
        self._server = PeerServer(sockets[index], self._answer)
        self._changes: dict[str, bool] = {}
        self._caught_up = False
        self._locks = NameLocks()
        self._orders = Shielded()
        self._adopting: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Answer the others, and catch up with what was loaded and unloaded by request."""
        await self._server.start()
        news = await self._heard()
        await self._adopt(news.loaded)
        following = [asyncio.create_task(self._follow(*each)) for each in news.unwritten.items()]
        if following:
            self._adopting += following
            await asyncio.wait(following, timeout=ADOPT_LIMIT_S)  # what takes longer goes on
        self._caught_up = True

    def close(self) -> None:
        """Answer nobody any more, and leave what is under way to the gateways that go on. Idempotent."""
        self._server.close()
        self._orders.give_up()

    async def _heard(self) -> News:
        """What the first one says that knows; those that are catching up themselves don't."""
        asked = [asyncio.create_task(ask(self._sockets[each], Changes(), ADOPT_LIMIT_S)) for each in self._others()]
        try:
            for answer in asyncio.as_completed(asked):
                with contextlib.suppress(PeerGone, HeadraceError):
                    return msgspec.msgpack.decode(await answer, type=News)
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return News()

    async def _follow(self, name: str, unwritten: Traffic) -> None:
        """What the others could not write must not come back with a gateway that starts."""
        try:
            await self._control.follow(name, unwritten)
        except HeadraceError as error:
            log.warning("not as at the other gateways", model=name, reason=error.text)

    # ------------------------------------------------------------ loading and unloading

    def index(self) -> list[ModelState]:
        """As `ModelControl.index`, of this gateway."""
        return self._control.index()

    async def load(self, name: str) -> None:
        """As `ModelControl.load`, at all gateways, even when the caller leaves meanwhile. Raises Overloaded, too."""
        await self._order("load", name)

    async def unload(self, name: str) -> None:
        """As `ModelControl.unload`, otherwise the same."""
        await self._order("unload", name)

    def traffic(self, name: str) -> Traffic:
        """As `ModelControl.traffic`, of this gateway."""
        return self._control.traffic(name)

    def standing(self, name: str) -> Standing:
        """As `ModelControl.standing`, of this gateway."""
        return self._control.standing(name)

    async def order(self, name: str, order: Order, by: str) -> Traffic:
        """As `ModelControl.order`, at all gateways, even when the caller leaves meanwhile. Raises Overloaded, too.

        Of the history only the last change is told.
        """
        if self._index == 0:
            body = await self._led(Ordered(name, order, by), lambda: self._order_here(name, order, by))
        else:
            known = await self._history(name, order)
            body = await self._led(Ordered(name, order, by), lambda: self._order_unless_done(name, order, by, known))
        return msgspec.msgpack.decode(body, type=Traffic)

    async def prepare(self, name: str, traffic: Traffic, *, at_once: bool) -> None:
        """Called by our own control before it writes traffic.json: the others load what that needs, too."""
        if at_once:
            await self._tell_others(Prepare(name, traffic), FOLLOW_LIMIT_S)
        else:  # one that hangs must not have the load that the others wait for take for ever
            await self._tell(await self._alive(self._others(), SHOW_LIMIT_S), Prepare(name, traffic), CONTROL_LIMIT_S)

    async def abandon(self, name: str, traffic: Traffic) -> None:
        """Called by our own control when it is not written after all."""
        with contextlib.suppress(HeadraceError):  # why it is not written is what is to be told
            await self._tell_others(Abandon(name, traffic), FOLLOW_LIMIT_S)

    async def adopt(self, name: str, unwritten: Traffic | None) -> None:
        """Called by our own control after that. It is written, whatever they say now: each looks at the files, too.

        What is not written yet each of them tries to write as well, since this one may go first.
        """
        told = None if unwritten is None else _last_only(unwritten)
        try:
            await self._tell_others(Adopt(name, told), FOLLOW_LIMIT_S)
        except HeadraceError as error:
            log.warning("another gateway does not follow at once", model=name, reason=error.text)

    async def _order_here(self, name: str, order: Order, by: str) -> bytes:
        return _told(await self._control.order(name, order, by, self))

    async def _order_unless_done(self, name: str, order: Order, by: str, known: History) -> bytes:
        """The gateway that was asked has gone, perhaps when it had done it: a rollback must not go back twice.

        `known`: the history before it was asked. What else is ordered twice changes nothing.
        """
        action = _NOT_TWICE.get(type(order))
        if action is not None and any(
            (change["action"], change["by"]) == (action, by)
            for change in _since(known, await self._history(name, order))
        ):
            await self._control.reconcile(name)
            return _told(self._control.traffic(name))
        return await self._order_here(name, order, by)

    async def _history(self, name: str, order: Order) -> History:
        return await self._control.history(name, READ_LIMIT_S if isinstance(order, RollBack) else None)

    async def _order(self, verb: Verb, name: str) -> None:
        await self._led(Control(verb, name, everywhere=True), lambda: self._at_all(verb, name))

    async def _led(self, question: Ask, here: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Done by the first gateway that lives: by `here` if that is this one.

        A caller that gives up must not leave the gateways different: what has begun goes on without it.
        """
        return await self._orders.carried_out(self._by_the_first(question, here))

    async def _by_the_first(self, question: Ask, here: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        hurries = isinstance(question, Ordered) and isinstance(question.order, RollBack)
        for index in await self._alive(range(self._index), HURRY_LIMIT_S if hurries else SHOW_LIMIT_S):
            with contextlib.suppress(PeerGone):
                return await ask(self._sockets[index], question, CONTROL_LIMIT_S)
        return await here()

    async def _alive(self, indexes: Sequence[int], limit_s: float) -> list[int]:
        """Those that answer: one that hangs must not lead. All are asked at once, so that several cost no more."""
        asked = (ask(self._sockets[index], Alive(), limit_s) for index in indexes)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [index for index, answer in zip(indexes, answers, strict=True) if isinstance(answer, bytes)]

    async def _tell_others(self, question: Ask, limit_s: float) -> None:
        await self._tell(self._others(), question, limit_s)

    async def _tell(self, indexes: Sequence[int], question: Ask, limit_s: float) -> None:
        """Raises what the first one to refuse says; who is gone, or slow, will read the files by itself."""
        told = [ask(self._sockets[index], question, limit_s) for index in indexes]
        for outcome in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, PeerGone):
                raise outcome

    async def _at_all(self, verb: Verb, name: str) -> bytes:
        failure: HeadraceError | None = None
        async with self._locks.held(name):
            try:
                await self._here(verb, name)
            except NotReady as error:  # it is served, and says why it can't be: at the others, too
                failure = error
            asked = Control(verb, name, everywhere=False)
            told = [ask(self._sockets[index], asked, CONTROL_LIMIT_S) for index in self._others()]
            for outcome in await asyncio.gather(*told, return_exceptions=True):
                if isinstance(outcome, HeadraceError):
                    failure = failure or outcome
                elif isinstance(outcome, BaseException) and not isinstance(outcome, PeerGone):
                    raise outcome
        if failure is not None:
            raise failure
        return b""

    async def _here(self, verb: Verb, name: str) -> None:
        loads = verb == "load"
        before = self._changes.get(name)
        self._changes[name] = loads  # first: who starts meanwhile is to hear of it
        try:
            await (self._control.load(name) if loads else self._control.unload(name))
        except UnknownModel:
            if before is None:
                self._changes.pop(name, None)
            raise

    async def _adopt(self, changes: dict[str, bool]) -> None:
        """As the others have been told before this gateway came."""

        async def one(verb: Verb, name: str) -> None:
            try:
                await self._here(verb, name)
            except HeadraceError as error:
                log.info("not as at the other gateways", model=name, reason=error.text)

        new = {name: loads for name, loads in changes.items() if name not in self._changes}
        self._adopting = [asyncio.create_task(one("load" if loads else "unload", name)) for name, loads in new.items()]
        if self._adopting:
            await asyncio.wait(self._adopting, timeout=ADOPT_LIMIT_S)  # what takes longer goes on

    # ------------------------------------------------------------ asked by others

    async def _answer(self, asked: Ask) -> bytes:
        match asked:
            case Changes():
                return self._told_changes()
            case Control(verb=verb, model=name, everywhere=everywhere):
                await (self._at_all(verb, name) if everywhere else self._here(verb, name))
            case Ordered(model=name, order=order, by=by):
                return await self._order_here(name, order, by)
            case Prepare(model=name, traffic=traffic):
                await self._control.prepare(name, traffic)
            case Abandon(model=name, traffic=traffic):
                self._control.abandon(name, traffic)
            case Adopt(model=name, unwritten=unwritten) if unwritten is not None:
                await self._control.follow(name, unwritten)
            case Adopt(model=name):
                if not await self._control.reconcile(name):
                    raise NotReady("another gateway could not follow; it tries again")
            case _:
                return self.show(asked)
        return b""

    def _told_changes(self) -> bytes:
        if not self._caught_up:
            raise NotReady("this gateway has just started itself")
        return msgspec.msgpack.encode(News(self._changes, self._control.kept()))


def _told(traffic: Traffic) -> bytes:
    return msgspec.msgpack.encode(_last_only(traffic))


def _last_only(traffic: Traffic) -> Traffic:
    return msgspec.structs.replace(traffic, history=traffic.history[-1:])


def _since(known: History, now: History) -> History:
    """What was changed meanwhile; of a full history, whose oldest changes are dropped, the last one."""
    if len(now) > len(known):
        return now[len(known) :]
    return [] if now == known else now[-1:]
