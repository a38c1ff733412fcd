// The router's JSON, with the key if there is one.

const STORED = "hackkv-key";
const PATIENCE_MS = 5000;

export class KeyWanted extends Error {}

export const hasKey = () => sessionStorage.getItem(STORED) !== null;
export const setKey = (key) => sessionStorage.setItem(STORED, key);

function headers(more = {}) {
  const key = sessionStorage.getItem(STORED);
  return key === null ? more : { ...more, Authorization: `Bearer ${key}` };
}

export async function getJson(path) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  if (response.status === 401) throw new KeyWanted();
  if (!response.ok) throw new Error(await complaint(response));
  return response.json();
}

// Parsed events of a streamed completion. Throws the server's error, whether it comes before or within the stream.
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (response.status === 401) throw new KeyWanted();
  if (!response.ok) throw new Error(await complaint(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}
