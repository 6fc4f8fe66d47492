# SPDX-License-Identifier: Apache-2.0
"""Single-player textarena games as episodes with incremental observations, reproducible from (game, seed).

textarena's own observation wrappers repeat the whole history every turn. A chat keeps its history, so a turn here
returns only what is new since the last one, without the player's own words; action wrappers stay in force.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from war_rl.envs.game_random import GameRandom, drawing_from, isolate

_VARIANTS = ("-raw", "-train")
"""textarena registers each game again under these suffixes, with other observation wrappers."""

_NEEDS = {
    "nltk": "It needs NLTK data: run `python -m nltk.downloader words averaged_perceptron_tagger_eng` once.",
    "openrouter": "It asks a judge model over the network: set OPENROUTER_API_KEY, or choose another game.",
}


class GameError(RuntimeError):
    """A game that cannot be played, or that broke while played. The message names game, seed and cause."""


class UnknownGameError(GameError):
    """The id is not a single-player game; the message names key, value and close choices."""


@dataclass(frozen=True)
class StepResult:
    """What one move led to.

    observation: text that is new since the last move ("" once the game is over and said nothing).
    done: whether the game is over.
    reward: the game's own reward once ``done``, else 0.0.
    info: ``invalid_move`` (this move was refused), and once done ``reason`` (the game's words).
    """

    observation: str
    done: bool
    reward: float
    info: dict[str, Any] = field(default_factory=dict)


def single_player_games() -> list[str]:
    """Ids of all single-player games that textarena registers, without its ``-raw`` and ``-train`` variants."""
    registry = _registry()
    return sorted(name for name in registry if not name.endswith(_VARIANTS) and _is_single_player(registry[name]))


def check_game(game: str, key: str = "game") -> None:
    """Refuse an id that is not a single-player game.

    Raises:
        UnknownGameError: naming ``key``, the value and the closest choices.
    """
    registry = _registry()
    if game in registry and _is_single_player(registry[game]):
        return
    problem = "is a game for several players" if game in registry else "is not a textarena game"
    names = single_player_games()
    close = difflib.get_close_matches(game, names, n=5, cutoff=0.5) or ["GuessTheNumber-v0", "Mastermind-v0"]
    raise UnknownGameError(
        f"{key}={game!r} {problem}; choose one of the {len(names)} single-player games, for example {', '.join(close)}"
    )


class TextArenaGame:
    """One episode of one game instance.

    Args:
        game: textarena id, for example ``GuessTheNumber-v0``.
        seed: fixes the instance. Two objects with the same game and seed give the same observations for the same moves,
            whatever else runs in the process.
        max_turns: passed to the game in place of its own turn limit, where the game has one. Unit: moves.

    Raises:
        UnknownGameError: not a single-player game.
        GameError: the game needs data or a service that is not there.
    """

    def __init__(self, game: str, seed: int, max_turns: int | None = None) -> None:
        check_game(game)
        self.game = game
        self.seed = int(seed)
        self.turns = 0
        self.invalid_moves = 0
        self._max_turns = max_turns
        self._streams = GameRandom(self.seed)
        self._env: Any = None
        self._done = False

    def reset(self) -> str:
        """Start the episode over; returns the opening text (rules and first position)."""
        self._streams = GameRandom(self.seed)
        self.turns = self.invalid_moves = 0
        self._done = False
        with drawing_from(self._streams):
            self._env = self._make()
            try:
                self._env.reset(num_players=1, seed=self.seed)
            except Exception as error:
                raise self._unplayable(error) from error
            return self._new_text()

    def step(self, action: str) -> StepResult:
        """Play one move given as text.

        Raises:
            GameError: before ``reset``, after the end, or when the game itself broke (its error is the cause).
        """
        if self._env is None or self._done:
            when = "after the end" if self._done else "before reset()"
            raise GameError(f"game={self.game!r} seed={self.seed}: step() called {when}")
        state = self._state
        errors = getattr(state, "error_count", 0)
        self.turns += 1
        with drawing_from(self._streams):
            try:
                done, _ = self._env.step(action)
            except Exception as error:
                raise GameError(
                    f"game={self.game!r} seed={self.seed} turn={self.turns} broke on move {action[:80]!r}: {error!r}"
                ) from error
            invalid = getattr(state, "error_count", 0) > errors or bool(state.game_info[0].get("invalid_move"))
            self.invalid_moves += invalid
            self._done = bool(done)
            observation = self._new_text()
        info: dict[str, Any] = {"invalid_move": invalid}
        if self._done:
            info["reason"] = state.game_info[0].get("reason") or ""
        return StepResult(observation, self._done, self.reward() if self._done else 0.0, info)

    def reward(self) -> float:
        """The game's own reward: the final one when it is over, otherwise :meth:`partial_reward`."""
        rewards = self._state.rewards if self._env is not None else None
        if self._done and rewards:
            return _number(rewards.get(0), self._state.game_info[0].get("reason"))
        return self.partial_reward()

    def partial_reward(self) -> float:
        """What the game itself gives for the position reached, for games that grade unfinished play; otherwise 0.0."""
        grade = getattr(self._base, "_get_percentage_completion", None) if self._env is not None else None
        if grade is None:
            return 0.0
        try:
            return float(grade())
        except Exception as error:
            raise GameError(f"game={self.game!r} seed={self.seed}: partial reward failed: {error!r}") from error

    @property
    def _base(self) -> Any:
        return _unwrapped(self._env)

    @property
    def _state(self) -> Any:
        return self._base.state

    def _make(self) -> Any:
        import textarena

        try:
            # Before the first game of its kind is built, since a constructor may already draw.
            _load_isolated(_module_of(_registry()[self.game]))
            env = textarena.make(self.game)
        except Exception as error:
            raise self._unplayable(error) from error
        base = _unwrapped(env)
        if self._max_turns is not None and hasattr(base, "max_turns"):
            base.max_turns = self._max_turns
        return env

    def _unplayable(self, error: Exception) -> GameError:
        text = f"{type(error).__name__}: {error}".lower()
        need = next((advice for word, advice in _NEEDS.items() if word in text), "")
        first_line = next((s for line in str(error).splitlines() if (s := line.strip(" *.\n"))), repr(error))
        return GameError(f"game={self.game!r} seed={self.seed} cannot start: {first_line}. {need}".rstrip())

    def _new_text(self) -> str:
        import textarena

        _, messages = self._base.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(text) for _, text, kind in messages if kind is not own).strip()


@cache
def _registry() -> dict[str, Any]:
    try:
        # The package first: it waits until another thread that is importing it has registered all games.
        import textarena  # noqa: F401
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise GameError("textarena is not installed; install it with `pip install textarena`") from error
    return dict(ENV_REGISTRY)


@cache
def _module_is_single_player(module: str) -> bool:
    # Read, not imported: importing some games starts downloads, and one release has a game that does not compile.
    source = _source_path(module)
    return source is not None and "SinglePlayerState(" in source.read_text(encoding="utf-8")


def _source_path(module: str) -> Path | None:
    import textarena

    package, _, rest = module.partition(".")
    if package == "textarena" and textarena.__file__ is not None:
        path = Path(textarena.__file__).parent.joinpath(*rest.split(".")).with_suffix(".py")
        return path if path.is_file() else None
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _module_of(spec: Any) -> str:
    entry = spec.entry_point
    return str(entry.split(":")[0] if isinstance(entry, str) else entry.__module__)


_isolated: set[str] = set()


def _load_isolated(module: str) -> None:
    if module not in _isolated:
        importlib.import_module(module)
        isolate("textarena", module)
        _isolated.add(module)


def _is_single_player(spec: Any) -> bool:
    return _module_is_single_player(_module_of(spec))


def _number(reward: Any, reason: Any) -> float:
    """The reward as a number. Four games pass reward and reason of an invalid move in each other's place."""
    if isinstance(reward, str):
        reward = str(reason).removeprefix("Invalid Move: ")
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise GameError(f"the game ended with a reward that is no number: {reward!r} (reason {reason!r})") from None


def _unwrapped(env: Any) -> Any:
    # Wrappers hold the wrapped environment in their own ``env``; looking it up by attribute would also find a game's.
    import textarena

    while isinstance(env, textarena.Wrapper):
        env = env.env
    return env
