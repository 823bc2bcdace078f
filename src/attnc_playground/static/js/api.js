// Requests to the server. A new request of a kind cancels the one before it, and the server then stops its worker.

export class ApiError extends Error {
  constructor(status, facts) {
    super(facts.message);
    Object.assign(this, { status, ...facts });
  }
}

const current = new Map();

/** Cancel the request of a kind that is on its way. */
export function cancel(kind) {
  current.get(kind)?.abort();
  current.delete(kind);
}

/**
 * POST JSON. Returns what `read` makes of the response, or throws ApiError. Returns null if the request was cancelled, which
 * it can be until the last byte has been read.
 */
export async function post(path, body, kind, read) {
  cancel(kind);
  const control = new AbortController();
  current.set(kind, control);
  try {
    const response = await fetch(`api/${path}`, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json', 'Attnc-Status': 'header' },
      body: JSON.stringify(body),
      signal: control.signal,
    });
    const status = Number(response.headers.get('Attnc-Status') ?? response.status);
    if (status >= 400) {
      const found = await response.json().catch(() => null);
      throw new ApiError(status, found?.error ?? { message: `the server answered ${status}` });
    }
    return await read(response);
  } catch (error) {
    if (control.signal.aborted) return null;
    if (error instanceof ApiError) throw error;
    throw new ApiError(0, { type: 'Offline', message: 'the server cannot be reached. Start it with `attnc serve`.' });
  } finally {
    if (current.get(kind) === control) current.delete(kind);
  }
}

export const postJson = (path, body, kind) => post(path, body, kind, (response) => response.json());

/** Offer bytes as a file. */
export function save(name, content, type) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
