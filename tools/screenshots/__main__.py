"""`python -m tools.screenshots`: write docs/prometheus-*.png, pictures of a real cluster in a real Prometheus.

A cluster with `fp16` serves for a while and then one with `hack`, two prefill and two decode nodes each, under a
Poisson load. The pictures show Prometheus' graph page. Needs Debian's packages `prometheus` (2.42, whose graph page it
knows) and `chromium`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlencode

import httpx
import yaml
from playwright.async_api import async_playwright

from app.cluster import ClusterPlan, running
from bench.cluster import until
from hackkv.errors import ConfigError
from hackkv.model.shipped import find_model
from tools.dashboards.boards import STAGE, mean_by

ROOT: Final = Path(__file__).parents[2]
CODECS: Final = ("fp16", "hack")
ROUTER_PORT, PROMETHEUS_PORT = 8040, 9140
"""Fixed ports: Prometheus finds both clusters, one after the other, at one address."""
SCRAPE: Final = "2s"
WINDOW: Final = "30s"
START_S: Final = 60.0
VIEW: Final = {"width": 1000, "height": 960}
WHOLE_QUERY: Final = ".expression_input { height: 4em !important }"

GRAPHS: Final = {
    "jct": (mean_by("stage", STAGE, WINDOW), True),
    "wire": (
        f"sum by (codec) (rate(hackkv_kv_transfer_bytes_total[{WINDOW}]))"
        f" / sum by (codec) (rate(hackkv_kv_transfer_fp16_bytes_total[{WINDOW}]))",
        False,
    ),
    "requests": (f"sum by (outcome) (rate(hackkv_requests_total[{WINDOW}])) > 0", True),
}
"""Name of the picture -> query, and whether its series are stacked."""


@contextlib.asynccontextmanager
async def prometheus(folder: Path) -> AsyncIterator[str]:
    """Run a server with the repository's rules and a short scrape interval; give its URL."""
    for rules in ("rules.yml", "alerts.yml"):
        shutil.copy(ROOT / "deploy/prometheus" / rules, folder)
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{ROUTER_PORT}"]}]
    del config["scrape_configs"][0]["authorization"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{PROMETHEUS_PORT}"
    process = await asyncio.create_subprocess_exec(
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={address}", "--log.level=warn"),
    )

    async def ready() -> bool:
        if process.returncode is not None:
            raise ConfigError(f"prometheus ended with exit code {process.returncode}; its message is above")
        async with httpx.AsyncClient() as client:
            try:
                return (await client.get(f"http://{address}/-/ready")).is_success
            except httpx.TransportError:
                return False

    try:
        await until(ready, START_S, "Prometheus is ready")
        yield f"http://{address}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def serve(codec: str, rate: float, seconds: float) -> None:
    """Start a cluster, load it, stop it."""
    model = str(find_model("").path)
    router = {"listen": {"port": ROUTER_PORT}, "control": {"port": 0}, "model": model}
    worker = {"model": {"path": model, "threads": 1}, "codec": {"name": codec}}
    async with running(ClusterPlan(router, worker), print) as cluster:
        load = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "measure.serve", "--base-url", cluster.url, "--tokenizer", model),
            *(
                "--input-len",
                "1000",
                "--output-len",
                "48",
                "--request-rate",
                str(rate),
                "--num-prompts",
                str(max(1, round(rate * seconds))),
            ),
        )
        if await load.wait() != 0:
            raise ConfigError(f"the load on {codec} failed; its message is above")


async def photograph(url: str, seconds: float, folder: Path) -> None:
    """Open the graph page with each query and save a picture of it."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (expr, stacked) in GRAPHS.items():
            page = await browser.new_page(viewport=VIEW)  # type: ignore[arg-type]
            query = {"expr": expr, "tab": "0", "stacked": str(int(stacked)), "range_input": f"{seconds:.0f}s"}
            await page.goto(f"{url}/graph?{urlencode({f'g0.{key}': value for key, value in query.items()})}")
            await page.wait_for_selector(".rickshaw_legend .line", timeout=1e3 * START_S)
            await page.wait_for_selector(".spinner", state="hidden")
            await page.add_style_tag(content=WHOLE_QUERY)
            await page.screenshot(path=folder / f"prometheus-{name}.png")
            print(folder / f"prometheus-{name}.png")
        await browser.close()


async def take(rate: float, seconds: float, folder: Path) -> None:
    """Run everything: Prometheus, a cluster per codec, the pictures."""
    for tool in ("prometheus", "chromium"):
        if shutil.which(tool) is None:
            raise ConfigError(f"{tool} is not installed")
    began = asyncio.get_running_loop().time()
    with TemporaryDirectory() as data:
        async with prometheus(Path(data)) as url:
            for codec in CODECS:
                await serve(codec, rate, seconds)
            await photograph(url, asyncio.get_running_loop().time() - began, folder)


def main(arguments: Sequence[str]) -> int:
    """Parse arguments and take the pictures; return the exit code."""
    parser = argparse.ArgumentParser("python -m tools.screenshots", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=90.0, help="load on each codec; default: %(default)s")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder; default: docs")
    parsed = parser.parse_args(arguments)
    try:
        asyncio.run(take(parsed.rate, parsed.seconds, parsed.out))
    except (ConfigError, TimeoutError) as error:
        print(f"screenshots: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
