// The last five minutes, from samples of counters. The difference of two samples is what happened between them.

import { STAGES } from "./stages.js";

const SPAN_S = 300;
const BUCKET_S = 5;
const SHORT_S = 10;

export class History {
  constructor() {
    this.forget();
  }

  forget() {
    this.samples = [];
  }

  get last() {
    return this.samples.at(-1);
  }

  add({ fields, rows }) {
    for (const row of rows) {
      this.samples.push(Object.fromEntries(fields.map((field, index) => [field, row[index]])));
    }
    const newest = this.last?.at_s ?? 0;
    this.samples = this.samples.filter((sample) => sample.at_s >= newest - SPAN_S - BUCKET_S);
  }

  // What happened in the last `span` seconds, or in less if samples begin later; `span_s` is the time covered.
  since(span) {
    if (this.samples.length < 2) return null;
    const last = this.last;
    const first = this.samples.find((sample) => sample.at_s >= last.at_s - span - 0.5);
    return first === last ? null : difference(first, last);
  }

  get whole() {
    return this.since(SPAN_S);
  }

  get recent() {
    return this.since(SHORT_S);
  }

  // One entry for each 5 s, on a grid that does not move; x is in seconds before now.
  buckets() {
    if (this.samples.length < 2) return [];
    const now = this.last.at_s;
    const edges = [];
    for (const sample of this.samples) {
      const slot = Math.floor(sample.at_s / BUCKET_S);
      if (edges.at(-1)?.slot !== slot) edges.push({ slot, sample });
    }
    if (edges.at(-1).sample !== this.last) edges.push({ slot: edges.at(-1).slot + 1, sample: this.last });
    return edges.slice(1).map((edge, index) => {
      const from = edges[index];
      const x = (from.slot + 0.5) * BUCKET_S - now;
      return { x, live: edge.sample.live, ...difference(from.sample, edge.sample) };
    });
  }
}

function difference(first, last) {
  const change = { span_s: last.at_s - first.at_s };
  for (const field of ["finished", "failed", "prompt_tokens", "output_tokens", "kv_bytes", "fp16_bytes"]) {
    change[field] = last[field] - first[field];
  }
  change.stages = Object.fromEntries(STAGES.map(([stage]) => [stage, last[`${stage}_s`] - first[`${stage}_s`]]));
  change.total_s = Object.values(change.stages).reduce((sum, spent) => sum + spent, 0);
  return change;
}
