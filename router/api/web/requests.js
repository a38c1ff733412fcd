// The last requests as a waterfall: a bar each, cut into stages, all on one scale. A row opens to the numbers.

import { byId, el, setText } from "./dom.js";
import { ago, bytes, count, percent, seconds } from "./format.js";
import { bar, stageTable } from "./stages.js";

const KEPT = 200;
const SHOWN = 12;

export class Requests {
  constructor() {
    this.forget();
    byId("hold").addEventListener("change", () => this.render());
  }

  forget() {
    this.ended = [];
    this.open = new Set();
    this.rows = new Map();
    this.longest = 0;
    this.visible = [];
  }

  get after() {
    return this.ended.at(-1)?.seq ?? 0;
  }

  add({ at_s, live, ended }) {
    this.now_s = at_s;
    this.ended = [...this.ended, ...ended].slice(-KEPT);
    setText("live-line", liveLine(live));
    this.render();
  }

  // Mean and p99 of the time to the first token in the last minute.
  firstToken() {
    const times = this.ended
      .filter((one) => one.ttft_s !== null && this.now_s - one.arrived_s - one.total_s < 60)
      .map((one) => one.ttft_s)
      .sort((a, b) => a - b);
    if (times.length === 0) return null;
    const mean = times.reduce((sum, time) => sum + time, 0) / times.length;
    return { mean, p99: times[Math.ceil(0.99 * times.length) - 1] };
  }

  render() {
    const none = this.ended.length === 0;
    byId("requests").hidden = none;
    byId("requests-empty").hidden = !none;
    if (!byId("hold").checked && this.open.size === 0) this.visible = this.ended.slice(-SHOWN).reverse();
    const longest = niceAbove(Math.max(1e-3, ...this.visible.map((one) => one.total_s)));
    if (longest !== this.longest) {
      this.longest = longest;
      this.rows.clear();
      setText("scale", `timeline, 0 to ${seconds(longest)}`);
    }
    const rows = this.visible.map((one) => this.row(one));
    this.rows = new Map(this.visible.map((one, index) => [one.seq, rows[index]]));
    const wanted = rows.flat();
    const body = byId("requests-rows");
    if (wanted.length !== body.children.length || wanted.some((row, index) => row !== body.children[index])) {
      const focused = document.activeElement?.closest?.("#requests-rows tr");
      body.replaceChildren(...wanted);
      if (focused?.isConnected) focused.querySelector("button").focus({ preventScroll: true });
    }
  }

  row(one) {
    const rows = this.rows.get(one.seq) ?? this.makeRow(one);
    const button = rows[0].querySelector("button");
    button.firstChild.data = ago(this.now_s - one.arrived_s - one.total_s);
    return rows;
  }

  makeRow(one) {
    const wrong = !["stop", "length"].includes(one.outcome);
    const opener = el("button", { class: "opener", type: "button" }, "");
    const open = this.open.has(one.seq);
    opener.setAttribute("aria-expanded", open);
    opener.addEventListener("click", () => this.toggle(one.seq));
    const track = bar(one, this.longest);
    if (wrong) track.append(el("span", { class: "outcome" }, one.outcome));
    const cells = [
      opener,
      `${count(one.prompt_tokens)} → ${count(one.output_tokens)}`,
      seconds(one.ttft_s),
      seconds(one.tpot_s),
      seconds(one.total_s),
      track,
    ];
    const row = el("tr", { class: wrong ? "wrong" : "" }, ...cells.map((cell) => el("td", {}, cell)));
    return open ? [row, detail(one)] : [row];
  }

  toggle(seq) {
    if (!this.open.delete(seq)) this.open.add(seq);
    this.rows.delete(seq);
    this.render();
    const [row] = this.rows.get(seq) ?? [];
    row?.querySelector("button").focus({ preventScroll: true });
  }
}

function detail(one) {
  const facts = [
    ["request", one.id],
    ...trace(one),
    ["ended", one.outcome],
    ["tokens", `${count(one.prompt_tokens)} in, ${count(one.output_tokens)} of ${count(one.max_tokens)} out`],
    ["first token, per token", `${seconds(one.ttft_s)}, ${seconds(one.tpot_s)}`],
    ["nodes", [one.prefill_node, one.decode_node].filter(Boolean).join(" → ") || "none"],
    ["placed on nodes", one.attempts === 1 ? "once" : `${count(one.attempts)} times`],
    ["prompt tokens not computed", count(one.cached_tokens)],
    ["… of them fetched from the decode node", count(one.fetched_tokens)],
    ["prompt tokens not sent", count(one.held_tokens)],
    ["tokens computed again", count(one.replayed_tokens)],
    ...Object.entries(one.sub_stages).map(([name, spent]) => [`${name}, part of a stage`, seconds(spent)]),
  ];
  const columns = el("div", { class: "columns" }, stageTable(one), factTable("This request", facts), kvTable(one.kv));
  return el("tr", { class: "detail" }, el("td", { colSpan: 6 }, columns));
}

// The trace of a request that has one; with a link if the router knows where traces are shown.
function trace({ trace_id, trace_link }) {
  if (!trace_id) return [];
  if (!trace_link) return [["trace", trace_id]];
  return [["trace", el("a", { href: trace_link, target: "_blank", rel: "noopener noreferrer" }, trace_id)]];
}

function kvTable({ bytes_by_plane, header_bytes, fp16_bytes, ratio }) {
  if (!fp16_bytes) return factTable("KV moved", [["nothing", ""]]);
  const planes = Object.entries(bytes_by_plane).map(([plane, size]) => [plane, bytes(size)]);
  return factTable("KV moved", [
    ...planes,
    ["headers", bytes(header_bytes)],
    ["as FP16", bytes(fp16_bytes)],
    ["share", percent(ratio)],
  ]);
}

function factTable(title, facts) {
  const body = el("tbody", {}, ...facts.map(([name, value]) => fact(name, value)));
  return el("table", { class: "facts" }, el("caption", {}, title), body);
}

const fact = (name, value) => el("tr", {}, el("td", { class: "name" }, name), el("td", { class: "number" }, value));

function liveLine(live) {
  if (live.length === 0) return "None under way.";
  const started = live.filter((one) => one.output_tokens > 0).length;
  const oldest = Math.max(...live.map((one) => one.elapsed_s));
  const parts = [`${count(live.length)} under way`, `${count(live.length - started)} before their first token`];
  return `${parts.join(", ")}, ${count(started)} generating; the oldest for ${seconds(oldest)}.`;
}

// 1, 2 or 5 times a power of ten: a scale that does not change with every request.
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
