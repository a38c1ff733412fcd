// Numbers as people read them.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => plain.format(value);

export function compact(value) {
  if (value < 10_000) return plain.format(value);
  const [size, unit] = value < 1e6 ? [1e3, "k"] : value < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return `${(value / size).toPrecision(3)} ${unit}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.00005) return "0 ms";
  if (value < 0.0995) return `${(1e3 * value).toFixed(1)} ms`;
  if (value < 0.9995) return `${(1e3 * value).toFixed(0)} ms`;
  if (value < 99.5) return `${value.toFixed(2)} s`;
  return `${value.toFixed(0)} s`;
}

export function bytes(value) {
  if (value < 1000) return `${plain.format(value)} B`;
  const [size, unit] = value < 1e6 ? [1e3, "kB"] : value < 1e9 ? [1e6, "MB"] : [1e9, "GB"];
  return `${(value / size).toPrecision(3)} ${unit}`;
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function ago(value) {
  if (value < 1.5) return "just now";
  if (value < 90) return `${value.toFixed(0)} s ago`;
  if (value < 5400) return `${(value / 60).toFixed(0)} min ago`;
  return `${(value / 3600).toFixed(0)} h ago`;
}
