// Who serves, how loaded they are, and who was lost.

import { byId, el } from "./dom.js";
import { ago, bytes, count } from "./format.js";

export function showNodes({ nodes, lost, missing }) {
  const items = [...nodes.map(node), ...lost.map(gone)];
  for (const role of missing) {
    if (!lost.some((node) => node.role === role)) items.push(absent(role));
  }
  byId("nodes").replaceChildren(...items);
}

function item(state, name, what, ...more) {
  const line = el("p", { class: `what ${state}` }, el("span", { class: "dot", "aria-hidden": "true" }), what);
  return el("li", {}, el("p", { class: "name" }, name), line, ...more);
}

function node(node) {
  const what = node.suspended ? `${node.role}, held back after a failure` : `${node.role}, ${busy(node)}`;
  const work = node.role === "decode" ? pages(node) : queue(node);
  return item(node.suspended ? "warn" : "ok", node.id, what, ...work, ...gauges(node.stats));
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

// What a node says of itself beyond that, under its own names; nothing of what is zero.
function gauges(stats) {
  const told = Object.entries(stats).filter(([, value]) => value > 0);
  const says = told.map(([name, value]) => {
    const words = name.replace(/^hackkv_/, "").replace(/_(total|bytes)$/, "").replaceAll("_", " ");
    return `${words} ${name.endsWith("_bytes") ? bytes(value) : count(value)}`;
  });
  return says.length ? [el("p", { class: "work" }, says.join("; "))] : [];
}

const gone = ({ id, role, gone_s }) => item("bad", id, `${role}, lost ${ago(gone_s)}`);

const absent = (role) => item("bad", `no ${role} node`, "requests are refused until one registers");
