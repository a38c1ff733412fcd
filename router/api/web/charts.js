// The three plots. They are drawn by uPlot; what they show is also in the tables and figures beside them.

import { byId, el } from "./dom.js";
import { compact, seconds } from "./format.js";
import { STAGES, colour } from "./stages.js";

const SPAN_S = 300;
const SHORTEST_S = 1.5; // a rate over less time than that is noise
const TICKS = [-300, -240, -180, -120, -60, 0];
const whole = (y) => (Number.isInteger(y) ? compact(y) : "");
const font = "12px system-ui, sans-serif";

class Plot {
  constructor(id, makeSeries, format, none) {
    this.box = byId(id);
    this.makeSeries = makeSeries;
    this.format = format;
    this.none = el("div", { class: "none" }, el("span", {}, none));
    this.box.append(this.none);
    this.data = null;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
    document.addEventListener("theme", () => this.rebuild());
    this.rebuild();
  }

  size() {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }

  rebuild() {
    this.plot?.destroy();
    const series = this.makeSeries();
    const axis = { stroke: colour("muted"), font, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    const data = this.data ?? [TICKS, ...series.map(() => TICKS.map(() => null))];
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [8, 14, 0, 0],
        legend: { show: false },
        cursor: { show: false },
        scales: { x: { time: false, range: [-SPAN_S, 0] }, y: { range: (_, low, high) => [0, high > 0 ? 1.08 * high : 1] } },
        axes: [
          { ...axis, size: 26, splits: () => TICKS, values: (_, xs) => xs.map((x) => (x === 0 ? "now" : `−${-x / 60} min`)) },
          { ...axis, size: 62, values: (_, ys) => ys.map((y) => this.format(y)) },
        ],
        series: [{}, ...series],
      },
      data,
      this.box,
    );
  }

  show(data) {
    this.data = data;
    this.none.hidden = data.slice(1).some((values) => values.some((value) => value > 0));
    this.plot.setData(data);
  }
}

const bars = (name) => ({
  stroke: colour(name),
  fill: colour(name),
  width: 0,
  points: { show: false },
  paths: uPlot.paths.bars({ size: [0.82, 40], align: 0 }),
});

export class Charts {
  constructor() {
    // Each stage is drawn from zero to the top of its part of the stack, the last stage first.
    const stack = () => STAGES.map(([stage]) => bars(stage)).reverse();
    this.jct = new Plot("jct-plot", stack, (y) => (y === 0 ? "0" : seconds(y)), "no request has ended in the last five minutes");
    const area = () => [{ stroke: colour("decode"), fill: `${colour("decode")}33`, width: 2, points: { show: false } }];
    this.tokens = new Plot("tokens-plot", area, whole, "no tokens in the last five minutes");
    const line = () => [{ stroke: colour("accent"), fill: `${colour("accent")}22`, width: 2, points: { show: false } }];
    this.live = new Plot("live-plot", line, whole, "nothing under way");
  }

  show(history) {
    const buckets = history.buckets().filter((bucket) => bucket.span_s > SHORTEST_S);
    const xs = buckets.map((bucket) => bucket.x);
    const tops = STAGES.map(() => []);
    for (const bucket of buckets) {
      let top = 0;
      STAGES.forEach(([stage], index) => {
        top += bucket.finished ? bucket.stages[stage] / bucket.finished : 0;
        tops[index].push(bucket.finished ? top : null);
      });
    }
    this.jct.show([xs, ...tops.reverse()]);
    this.tokens.show([xs, buckets.map((bucket) => bucket.output_tokens / bucket.span_s)]);
    const samples = history.samples;
    const now = history.last.at_s;
    this.live.show([samples.map((sample) => sample.at_s - now), samples.map((sample) => sample.live + sample.waiting)]);
  }
}
