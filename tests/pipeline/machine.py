"""A pipeline of small integers: carries a schedule out without looking at names, as processes do.

Each rank runs its row. Between two ranks is a queue for each direction: a send puts a number in, a receive takes the
oldest one, whatever it was meant to be. Activations and gradients are numbers that depend on everything behind them, so
two that were swapped give other weight gradients. Knows nothing of `verify`.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from enum import Enum

from lowtide.pipeline.schedule import Action, AnyAction, Kind, Schedule


class Outcome(Enum):
    RIGHT = "right"
    WRONG = "other gradients than one process gives"
    STUCK = "no rank can go on"
    CRASHED = "an action reads what its rank does not have"


class Machine:
    def __init__(self, schedule: Schedule, *, rendezvous: bool, seed: int) -> None:
        self.schedule = schedule
        self.rendezvous = rendezvous
        self.rng = random.Random(seed)
        self.queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.values: list[dict[tuple[str, int, int], int]] = [{} for _ in schedule.actions]
        self.at = [0] * schedule.num_ranks
        self.weights: list[tuple[int, int, int]] = []

    def run(self) -> Outcome:
        try:
            while unfinished := [rank for rank, row in enumerate(self.schedule.actions) if self.at[rank] < len(row)]:
                able = [rank for rank in unfinished if self._is_able(rank)]
                if not able:
                    return Outcome.STUCK
                rank = self.rng.choice(able)
                self._do(rank, self.schedule.actions[rank][self.at[rank]])
                self.at[rank] += 1
        except KeyError:
            return Outcome.CRASHED
        return Outcome.RIGHT if sorted(self.weights) == _of_one_process(self.schedule) else Outcome.WRONG

    def _peer(self, action: Action) -> int:
        step = 1 if action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD) else -1
        return self.schedule.rank_of_stage[action.stage + step]

    def _is_able(self, rank: int) -> bool:
        action = self.schedule.actions[rank][self.at[rank]].parts[0]
        if action.kind.startswith("RECV"):
            return bool(self.queues[self._peer(action), rank])
        if action.kind.startswith("SEND") and self.rendezvous:
            peer = self._peer(action)
            if self.at[peer] == len(self.schedule.actions[peer]) or self.queues[rank, peer]:
                return False
            theirs = self.schedule.actions[peer][self.at[peer]].parts[0]
            return theirs.kind.startswith("RECV") and self._peer(theirs) == rank
        return True

    def _do(self, rank: int, every: AnyAction) -> None:
        values = self.values[rank]
        made = {}
        for action in every.parts:
            stage, micro_batch = action.stage, action.micro_batch
            if action.kind == "SEND_F":
                self.queues[rank, self._peer(action)].append(values["out", stage, micro_batch])
            elif action.kind == "SEND_B":
                self.queues[rank, self._peer(action)].append(values["grad", stage, micro_batch])
            elif action.kind == "RECV_F":
                values["out", stage - 1, micro_batch] = self.queues[self._peer(action), rank].popleft()
            elif action.kind == "RECV_B":
                values["grad", stage + 1, micro_batch] = self.queues[self._peer(action), rank].popleft()
            elif action.kind == "F":
                read = values["out", stage - 1, micro_batch] if stage else micro_batch
                made["out", stage, micro_batch] = hash(("out", stage, read))
            elif action.kind == "W":
                self.weights.append((stage, micro_batch, values["put off", stage, micro_batch]))
            else:
                last = stage == self.schedule.num_stages - 1
                output = values["out", stage, micro_batch]
                gradient = micro_batch if last else values["grad", stage + 1, micro_batch]
                made["grad", stage, micro_batch] = hash(("grad", stage, output, gradient))
                if action.kind == "B":
                    self.weights.append((stage, micro_batch, hash(("weight", output, gradient))))
                else:
                    made["put off", stage, micro_batch] = hash(("weight", output, gradient))
        values |= made  # of a pair, neither part reads what the other makes


def _of_one_process(schedule: Schedule) -> list[tuple[int, int, int]]:
    weights = []
    for micro_batch in range(schedule.num_micro_batches):
        outputs = []
        value = micro_batch
        for stage in range(schedule.num_stages):
            value = hash(("out", stage, value))
            outputs.append(value)
        gradient = micro_batch
        for stage in reversed(range(schedule.num_stages)):
            weights.append((stage, micro_batch, hash(("weight", outputs[stage], gradient))))
            gradient = hash(("grad", stage, outputs[stage], gradient))
    return sorted(weights)
