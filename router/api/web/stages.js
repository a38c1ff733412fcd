// The stages of a job's completion time, in the order of a request's life: names, meaning, bars and tables.

import { el } from "./dom.js";
import { percent, seconds } from "./format.js";

export const STAGES = [
  ["router_queue", "checked, tokenized, waiting to be dispatched"],
  ["prefill_queue", "waiting for the prefill node"],
  ["prefill", "computing the prompt"],
  ["swap_wait", "compressed KV waits in host memory for a decode node with room"],
  ["transfer", "what was left of the transfer after the first token"],
  ["decode_queue", "waiting for a place in the batch"],
  ["decode", "generating"],
  ["stream", "everything else: detokenizing, sockets, event loops"],
];

export const colour = (stage) => getComputedStyle(document.documentElement).getPropertyValue(`--${stage}`).trim();

export const swatch = (stage) => {
  const mark = el("span", { class: "swatch" });
  mark.style.background = `var(--${stage})`;
  return mark;
};

// One request as a bar; its parts have the widths of the stages, on a scale of `longest` seconds for the whole track.
export function bar(account, longest) {
  const parts = STAGES.filter(([stage]) => account.stages[stage] > 0);
  const says = parts.map(([stage]) => `${stage} ${seconds(account.stages[stage])}`).join(", ");
  const track = el("div", { class: "bar", role: "img", "aria-label": `total ${seconds(account.total_s)}: ${says}` });
  for (const [stage] of parts) {
    const part = el("span", { title: `${stage}: ${seconds(account.stages[stage])}` });
    part.dataset.stage = stage;
    part.dataset.seconds = account.stages[stage];
    part.style.width = `${(100 * account.stages[stage]) / longest}%`;
    part.style.background = `var(--${stage})`;
    track.append(part);
  }
  return track;
}

// The same bar in words, without stages that are too short to be seen.
export function legend(account) {
  const parts = STAGES.filter(([stage]) => account.stages[stage] >= 0.005 * account.total_s);
  return el("ul", {}, ...parts.map(([stage]) => el("li", {}, swatch(stage), `${stage} ${seconds(account.stages[stage])}`)));
}

const HEADINGS = [["stage", ""], ["what passes there", "says"], ["time", "number"], ["share", "number"]];

export function stageTable(account) {
  const body = el("tbody");
  for (const [stage, meaning] of STAGES) {
    const spent = account.stages[stage];
    body.append(row(el("td", {}, swatch(stage), stage), meaning, spent, spent / account.total_s));
  }
  const total = row(el("td", {}, "total"), "", STAGES.reduce((sum, [stage]) => sum + account.stages[stage], 0), 1);
  total.className = "total";
  body.append(total);
  const head = el("tr", {}, ...HEADINGS.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
  return el("table", { class: "stages" }, el("caption", {}, "Stages"), el("thead", {}, head), body);
}

function row(name, meaning, spent, share) {
  const cells = [el("td", { class: "says" }, meaning), el("td", { class: "number" }, seconds(spent))];
  return el("tr", {}, name, ...cells, el("td", { class: "number" }, percent(share)));
}
