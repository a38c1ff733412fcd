"""Decides when a rule strikes. Its action is carried out elsewhere (`faults.injector`)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fnmatch import fnmatchcase

from faults.plan import FaultPlan, FaultRule, Point


@dataclass(slots=True)
class Armed:
    """A rule on one node, with its own random numbers and counts."""

    rule: FaultRule
    chance: random.Random
    seen: int = 0
    struck: int = 0

    def strikes(self, point: Point, request: str) -> bool:
        """Count the moment if it matches the rule. Returns whether the rule strikes now."""
        rule = self.rule
        if rule.at is not point or not fnmatchcase(request, rule.request):
            return False
        self.seen += 1
        spent = rule.times and self.struck >= rule.times
        hit = not spent and rule.nth in (0, self.seen) and self.chance.random() < rule.chance
        self.struck += hit
        return hit


def armed(plan: FaultPlan, node: str) -> list[Armed]:
    """The rules that concern a node, with counts of 0."""
    return [
        Armed(rule, random.Random(f"{plan.seed}/{node}/{index}"))
        for index, rule in enumerate(plan.rules)
        if fnmatchcase(node, rule.node)
    ]
