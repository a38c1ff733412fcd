// The nodes: which serve, how loaded they are, and which were lost.

import { byId, el } from "./dom.js";
import { ago, bytes, count, percent } from "./format.js";

export function showNodes({ nodes, gone, missing }) {
  const items = [...nodes.map(node), ...gone.map(absentee)];
  for (const role of missing) {
    if (!gone.some((node) => node.role === role)) items.push(absent(role));
  }
  byId("nodes").replaceChildren(...items);
}

function item(state, name, what, ...more) {
  const line = el("p", { class: `what ${state}` }, el("span", { class: "dot", "aria-hidden": "true" }), what);
  return el("li", {}, el("p", { class: "name" }, name), line, ...more);
}

function node(node) {
  const work = node.role === "decode" ? pages(node) : queue(node);
  const [state, what] = condition(node);
  return item(state, node.id, `${node.role}, ${what}`, ...work, ...kept(node.stats), ...gauges(node.stats), ...loss(node.codec_loss));
}

function condition(node) {
  if (node.draining) return ["warn", `about to stop, ${busy(node)} left`];
  if (node.suspended) return ["warn", "held back after a failure"];
  return ["ok", busy(node)];
}

function busy({ requests }) {
  return requests === 0 ? "idle" : `${count(requests)} ${requests === 1 ? "request" : "requests"}`;
}

function pages({ total_pages, free_pages, page_tokens, tokens }) {
  const used = total_pages - free_pages;
  const meter = el("div", { class: "meter" }, el("span"));
  meter.firstChild.style.width = `${(100 * used) / Math.max(1, total_pages)}%`;
  const says = `${count(used)} of ${count(total_pages)} pages held (${page_tokens} tokens each); ${count(tokens)} tokens outstanding`;
  return [meter, el("p", { class: "work" }, says)];
}

function queue({ tokens, running, waiting }) {
  const says = `${count(tokens)} tokens queued; ${count(running)} running, ${count(waiting)} waiting`;
  return [el("p", { class: "work" }, says)];
}

// Those of a node's own figures that show pressure. /metrics has the others.
function gauges(stats) {
  const says = [];
  const pool = stats.hackkv_host_pool_bytes;
  const capacity = stats.hackkv_host_pool_capacity_bytes;
  if (pool) says.push(`host pool ${bytes(pool)}${capacity ? ` of ${bytes(capacity)}` : ""}`);
  if (stats.hackkv_swapped_sequences) says.push(`${count(stats.hackkv_swapped_sequences)} swapped out`);
  return says.length ? [el("p", { class: "work" }, says.join("; "))] : [];
}

// Pages that a node keeps for later prompts, and how much of the prompts so far was there.
function kept(stats) {
  const name = "hackkv_prefix_pages" in stats ? "hackkv_prefix" : "hackkv_held";
  const [here, host] = [stats[`${name}_pages`], stats[`${name}_host_pages`]];
  const [asked, hit] = [stats[`${name}_queries_total`], stats[`${name}_hits_total`]];
  if (!asked) return [];
  const where = host ? `, ${count(host)} in host memory` : "";
  const noun = here + host === 1 ? "page" : "pages";
  const text = `${count(here + host)} ${noun} kept${where}; ${percent(hit / asked)} of what prompts asked for was here already`;
  return [el("p", { class: "work kept" }, text)];
}

// What the node's codec costs its model, as it measured when it started; lossless codecs are not measured.
function loss(measured) {
  if (!measured) return [];
  const { kl, top1, perplexity_ratio } = measured;
  if (kl === null) return [el("p", { class: "work" }, "the codec breaks this model")];
  const ratio = perplexity_ratio === null ? "" : `, perplexity \u00d7 ${perplexity_ratio.toFixed(3)}`;
  return [el("p", { class: "work" }, `KL ${kl.toFixed(3)} from exact KV, ${percent(top1)} of first choices${ratio}`)];
}

const absentee = ({ id, role, drained, gone_s }) =>
  drained ? item("", id, `${role}, stopped ${ago(gone_s)}`) : item("bad", id, `${role}, lost ${ago(gone_s)}`);

const absent = (role) => item("bad", `no ${role} node`, "requests are refused until one registers");
