# SPDX-License-Identifier: Apache-2.0
"""Games are reproducible, isolated from each other and from the process, and end well."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("textarena")

from war_rl.envs.game_random import GameRandom, drawing_from, isolate
from war_rl.envs.textarena_game import GameError, TextArenaGame, UnknownGameError, single_player_games

GUESS = "GuessTheNumber-v0"
# One game that draws during play (2048), one that draws for every hand (Blackjack), one that draws once.
PLAYED = (GUESS, "2048-v0", "Blackjack-v0")
MOVES = {
    GUESS: [f"[{n}]" for n in range(1, 21)],
    "2048-v0": ["[up]", "[left]", "[down]", "[right]"] * 5,
    "Blackjack-v0": ["[hit]", "[stand]"] * 10,
}


def transcript(game: str, seed: int, between=lambda: None) -> list[str]:
    played = TextArenaGame(game, seed)
    lines = [played.reset()]
    for move in MOVES[game]:
        between()
        result = played.step(move)
        lines.append(f"{result.observation}|{result.done}|{result.reward}")
        if result.done:
            break
    return lines


def secret(game: TextArenaGame) -> int:
    return game._state.game_state["game_number"]


@pytest.mark.parametrize("game", PLAYED)
def test_same_seed_same_transcript_and_seeds_differ(game):
    assert transcript(game, 3) == transcript(game, 3)
    assert len({tuple(transcript(game, seed)) for seed in range(8)}) > 3


def test_fifty_concurrent_games_give_the_sequential_transcripts():
    jobs = [(PLAYED[i % 3], i) for i in range(50)]
    sequential = [transcript(*job) for job in jobs]
    # The barrier makes all threads interleave at every move, whatever the scheduler does.
    barrier = threading.Barrier(50)

    def play(job):
        def meet():
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(timeout=60)

        try:
            return transcript(*job, between=meet)
        finally:
            barrier.abort()

    with ThreadPoolExecutor(50) as pool:
        concurrent = list(pool.map(play, jobs))
    assert concurrent == sequential


@pytest.mark.parametrize("game", PLAYED)
def test_process_wide_random_state_is_neither_read_nor_changed(game):
    expected = transcript(game, 5)
    random.seed(1)
    np.random.seed(1)
    before, before_numpy = random.getstate(), np.random.get_state()[1].tolist()
    assert transcript(game, 5, between=lambda: None) == expected
    assert random.getstate() == before and np.random.get_state()[1].tolist() == before_numpy
    assert transcript(game, 5, between=random.random) == expected


def test_stand_ins_cover_names_imported_directly_and_numpy(monkeypatch):
    import sys
    import types

    module = types.ModuleType("fake_game")
    exec("import random, numpy as np\nfrom random import randint", vars(module))
    monkeypatch.setitem(sys.modules, "fake_game", module)
    isolate("fake_game")

    def draw():
        with drawing_from(GameRandom(9)):
            return (
                module.random.random(),
                module.randint(0, 10**9),
                module.np.random.randint(10**6),
                module.np.random.default_rng().integers(10**9),
            )

    assert draw() == draw()
    assert module.np.array([1]).sum() == 1 and isinstance(np.ones(1), module.np.ndarray)
    random.seed(4)
    outside = module.random.random()
    random.seed(4)
    assert outside == random.random()


def test_observations_are_incremental_and_without_the_players_own_words():
    game = TextArenaGame(GUESS, 0)
    opening = game.reset()
    guess = 1 if secret(game) != 1 else 2
    result = game.step(f"I say [{guess}] loudly")
    assert "Guess The Number" in opening
    assert result.observation == "The target number is higher." and not result.done and result.reward == 0.0


def test_winning_gives_the_games_reward():
    game = TextArenaGame(GUESS, 0)
    game.reset()
    result = game.step(str(secret(game)))  # without brackets: the game's own action wrapper stays in force
    assert result.done and result.reward == 1.0 and "correct" in result.info["reason"]
    with pytest.raises(GameError, match="after the end"):
        game.step("[1]")


def test_two_invalid_moves_end_the_game_with_partial_reward():
    game = TextArenaGame(GUESS, 0)
    game.reset()
    guess = 20 if secret(game) != 20 else 19
    game.step(f"[{guess}]")
    first, second = game.step("no idea [x]"), game.step("still none [x]")
    assert first.info["invalid_move"] and not first.done and "invalid" in first.observation
    assert second.done and game.invalid_moves == 2
    assert second.reward == pytest.approx(1 - abs(guess - secret(game)) / 19)


@pytest.mark.parametrize("last", [["[{}]"], ["no number [x]", "no number [x]"], ["no number [x]", "[{}]"]])
def test_turn_limit_ends_with_partial_reward_even_on_malformed_moves(last):
    game = TextArenaGame(GUESS, 0, max_turns=3)
    game.reset()
    wrong = [n for n in range(1, 21) if n != secret(game)]
    assert not any(game.step(f"[{n}]").done for n in wrong[:3])
    final = [game.step(move.format(wrong[3])) for move in last][-1]
    assert final.done and 0.0 < final.reward < 1.0


def test_game_that_breaks_names_game_seed_turn_and_move(monkeypatch):
    game = TextArenaGame(GUESS, 4)
    game.reset()
    monkeypatch.setattr(game._env, "step", lambda action: 1 / 0)
    with pytest.raises(GameError, match=r"GuessTheNumber-v0.*seed=4 turn=1.*\[7\].*ZeroDivisionError"):
        game.step("[7]")


def test_unfinished_game_is_graded_by_the_game_itself():
    game = TextArenaGame(GUESS, 0)
    game.reset()
    assert game.reward() == 0.0
    guess = 20 if secret(game) != 20 else 19
    game.step(f"[{guess}]")
    assert game.reward() == pytest.approx(1 - abs(guess - secret(game)) / 19)


def test_reward_and_reason_swapped_by_the_game_are_put_right():
    game = TextArenaGame("Countdown-v0", 0)
    game.reset()
    game.step("nonsense")
    result = game.step("nonsense")
    assert result.done and isinstance(result.reward, float)


@pytest.mark.parametrize(
    ("game", "words"),
    [
        ("GuesTheNumber-v0", ["GuesTheNumber-v0", "is not a textarena game", "GuessTheNumber-v0"]),
        ("TicTacToe-v0", ["several players", "single-player"]),
    ],
)
def test_wrong_game_is_refused_with_key_value_and_choices(game, words):
    with pytest.raises(UnknownGameError) as caught:
        TextArenaGame(game, 0)
    assert all(word in str(caught.value) for word in ["game=", *words])


def test_game_that_cannot_start_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(GameError, match=r"TwentyQuestions-v0.*OPENROUTER_API_KEY"):
        TextArenaGame("TwentyQuestions-v0", 0).reset()


def test_list_of_games_is_single_player_and_without_variants():
    games = single_player_games()
    assert GUESS in games and "Mastermind-v0-hard" in games
    assert "TicTacToe-v0" not in games and f"{GUESS}-raw" not in games
