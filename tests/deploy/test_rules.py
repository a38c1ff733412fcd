"""Recording rules and alerts pass Prometheus' own checker."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"


def run(*command: str) -> str:
    """Run a checker; return its output. If the checker fails, fails with the output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_and_rules_are_valid(promtool: str) -> None:
    run(promtool, "check", "config", "--syntax-only", str(FOLDER / "prometheus.yml"))
    run(promtool, "check", "rules", "--lint-fatal", str(FOLDER / "rules.yml"), str(FOLDER / "alerts.yml"))


def test_rules_and_alerts_say_what_they_should(promtool: str) -> None:
    run(promtool, "test", "rules", str(FOLDER / "alerts_test.yml"))


def test_every_alert_is_tested() -> None:
    alerts = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    cases = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {check["alertname"] for case in cases for check in case.get("alert_rule_test", ()) if check["exp_alerts"]}
    assert fired == {rule["alert"] for group in alerts["groups"] for rule in group["rules"]}
