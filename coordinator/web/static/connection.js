// The way to the server: a first look that can say what is wrong, then a stream of frames that comes back by itself.

const AGAIN_MS = 4000;
const asked = new URLSearchParams(location.search).get("run");
const query = asked ? `?run=${encodeURIComponent(asked)}` : "";

export class Connection {
  constructor({ onFrame, onStatus, onProblem, onToken }) {
    Object.assign(this, { onFrame, onStatus, onProblem, onToken });
    this._source = null;
  }

  async open() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) {
      history.replaceState(null, "", location.pathname + location.search); // so that it is in no history and no picture
      if (!(await this.login(given))) return;
    }
    await this._look();
  }

  async login(token) {
    const answer = await this._fetch("/api/login", { headers: { Authorization: `Bearer ${token}` } });
    if (answer && !answer.ok) {
      this.onToken(await problemOf(answer));
      return false;
    }
    return Boolean(answer);
  }

  async _look() {
    const answer = await this._fetch(`/api/state${query}`);
    if (!answer) {
      this.onStatus("the page's process does not answer; trying again …");
      setTimeout(() => this._look(), AGAIN_MS);
    } else if (answer.status === 401) {
      this.onToken(await problemOf(answer));
    } else if (!answer.ok) {
      this.onProblem(await problemOf(answer));
    } else {
      this.onProblem("");
      this.onFrame(await answer.json());
      this._stream();
    }
  }

  _stream() {
    const source = (this._source = new EventSource(`/api/stream${query}`));
    source.onopen = () => this.onStatus("live");
    source.onmessage = (event) => this.onFrame(JSON.parse(event.data));
    source.addEventListener("bye", () => {
      source.close();
      this.onStatus("ended: this is the last state; ‘ringtune page DIR’ opens it again");
      setTimeout(() => this._look2(), 2 * AGAIN_MS);
    });
    source.addEventListener("gone", (event) => {
      source.close();
      this.onProblem(`This run is gone: the page shows ${event.data || "no run"} now. Leave ?run= out to follow the newest run.`);
    });
    source.onerror = () => {
      source.close();
      this.onStatus("the connection broke; trying again …");
      setTimeout(() => this._look(), AGAIN_MS);
    };
  }

  // After the end: come back only when there is something to come back to, and leave the last state until then.
  async _look2() {
    const answer = await this._fetch(`/api/state${query}`);
    if (answer?.ok) {
      this.onFrame(await answer.json());
      this._stream();
    } else setTimeout(() => this._look2(), 2 * AGAIN_MS);
  }

  async _fetch(path, options = {}) {
    try {
      return await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
    } catch {
      return null;
    }
  }
}

export async function problemOf(answer) {
  try {
    return (await answer.json()).error ?? `the server says ${answer.status}`;
  } catch {
    return `the server says ${answer.status}`;
  }
}
