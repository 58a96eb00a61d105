// A client of the wire protocol (docs/wire.md) in Node.js 18 or newer, with nothing but its standard library.
//
//     TASUKI_TOKEN=… node examples/node_client.mjs tcp://127.0.0.1:7000 [HOW_MANY]
//
// Asks square_worker.py for the squares of 1 to HOW_MANY (2,000) and prints their sum. Each job has an id of its own, so the server
// may be killed and started again meanwhile: what was not answered is sent again, and every job runs once.

import net from "node:net";
import { createHash, randomUUID } from "node:crypto";

const SUBMIT = 1, ACK = 3, RESULT = 5, HELLO = 9, ERROR = 11, HEARTBEAT = 12, CHUNK = 13, WELCOME = 17, REQUEST = 18, REPLY = 19;
const BLOB_GET = 21;
const BATCH = 1;
const ITEMS_MAX = 1024;
const HELLO_TIMEOUT_MS = 10_000;
const FINAL = new Set(["UNAUTHORIZED", "FORBIDDEN", "VERSION", "INVALID"]); // answers to a Hello after which dialling again is no use
const UNREADABLE = new Set(["PROTOCOL", "TOO_LARGE"]); // a request was the reason; sent again, it would be again

// ---------------------------------------------------------------------------------------------------- msgpack

function encode(value) {
  const parts = [];
  write(value, parts);
  return Buffer.concat(parts);
}

function write(value, parts) {
  if (value === null || value === undefined) parts.push(Buffer.of(0xc0));
  else if (typeof value === "boolean") parts.push(Buffer.of(value ? 0xc3 : 0xc2));
  else if (typeof value === "number") parts.push(number(value));
  else if (typeof value === "string") {
    const text = Buffer.from(value);
    parts.push(text.length < 32 ? Buffer.of(0xa0 | text.length) : sized(0xd9, text.length), text);
  } else if (Buffer.isBuffer(value)) parts.push(sized(0xc4, value.length), value);
  else if (Array.isArray(value)) {
    parts.push(value.length < 16 ? Buffer.of(0x90 | value.length) : sized(0xdb, value.length));
    for (const item of value) write(item, parts);
  } else {
    const fields = Object.entries(value);
    if (fields.length > 15) throw new RangeError("a map of more than 15 fields is not needed here");
    parts.push(Buffer.of(0x80 | fields.length));
    for (const [name, field] of fields) write(name, parts), write(field, parts);
  }
}

// The first byte tells the width of the length: `base` 1 byte (not for arrays), base + 1: 2 bytes, base + 2: 4 bytes.
function sized(base, length) {
  if (length < 256 && base !== 0xdb) return Buffer.of(base, length);
  const head = Buffer.alloc(length < 65536 ? 3 : 5);
  head[0] = base + (length < 65536 ? 1 : 2);
  length < 65536 ? head.writeUInt16BE(length, 1) : head.writeUInt32BE(length, 1);
  return head;
}

function number(value) {
  if (Number.isInteger(value) && value >= 0 && value < 128) return Buffer.of(value);
  const bytes = Buffer.alloc(9);
  if (Number.isSafeInteger(value)) (bytes[0] = 0xd3), bytes.writeBigInt64BE(BigInt(value), 1);
  else (bytes[0] = 0xcb), bytes.writeDoubleBE(value, 1);
  return bytes;
}

function decode(bytes) {
  let at = 0;
  const unsigned = (width) => ((at += width), width === 8 ? Number(bytes.readBigUInt64BE(at - 8)) : bytes.readUIntBE(at - width, width));
  const signed = (width) => ((at += width), width === 8 ? Number(bytes.readBigInt64BE(at - 8)) : bytes.readIntBE(at - width, width));
  const take = (length) => bytes.subarray(at, (at += length));
  const list = (length) => Array.from({ length }, read);
  const map = (length) => Object.fromEntries(Array.from({ length }, () => [read(), read()]));
  function read() {
    const first = unsigned(1);
    if (first < 0x80) return first;
    if (first < 0x90) return map(first & 15);
    if (first < 0xa0) return list(first & 15);
    if (first < 0xc0) return take(first & 31).toString();
    if (first >= 0xe0) return first - 256;
    switch (first) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return take(unsigned(1 << (first - 0xc4)));
      case 0xca: return (at += 4), bytes.readFloatBE(at - 4);
      case 0xcb: return (at += 8), bytes.readDoubleBE(at - 8);
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return unsigned(1 << (first - 0xcc));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return signed(1 << (first - 0xd0));
      case 0xd9: case 0xda: case 0xdb: return take(unsigned(1 << (first - 0xd9))).toString();
      case 0xdc: case 0xdd: return list(unsigned(2 << (first - 0xdc)));
      case 0xde: case 0xdf: return map(unsigned(2 << (first - 0xde)));
      default: throw new Error(`msgpack type ${first} is not part of the protocol`);
    }
  }
  return bytes.length ? read() : null;
}

// ---------------------------------------------------------------------------------------------------- frames

function frame(type, header, items) {
  const head = encode(header), payload = items === undefined ? Buffer.alloc(0) : encode(items);
  const start = Buffer.alloc(8);
  start.writeUInt32LE(4 + head.length + payload.length, 0);
  start[4] = type;
  start[5] = Array.isArray(items) ? BATCH : 0;
  start.writeUInt16LE(head.length, 6);
  return Buffer.concat([start, head, payload]);
}

// ---------------------------------------------------------------------------------------------------- client

class Client {
  constructor(url, token) {
    const { hostname, port } = new URL(url.replace(/^tcp:/, "http:"));
    this.address = { host: hostname, port: Number(port) || 7000 };
    this.token = token;
    this.requests = new Map(); // msg_id → {type, header, items, chunks, resolve, reject}: kept until it is answered
    this.awaited = new Map(); // job_id → {resolve, reject}
    this.lastId = 0;
    this.failedDials = 0;
    this.dial();
  }

  /** Submit [{job_id, subject, payload}]; returns for each job a promise of its result, in bytes. */
  submit(specs) {
    const results = specs.map((spec) => new Promise((resolve, reject) => this.awaited.set(spec.job_id, { resolve, reject })));
    for (let at = 0; at < specs.length; at += ITEMS_MAX) {
      const items = specs.slice(at, at + ITEMS_MAX);
      this.ask(SUBMIT, {}, items)
        .then((accepted) => this.refused(accepted.items ?? []))
        .catch((error) => items.forEach((spec) => this.end(spec.job_id, error)));
    }
    return results;
  }

  close() {
    this.closed = true;
    clearInterval(this.beat);
    this.socket.destroy();
  }

  // -- requests and answers
  ask(type, header, items) {
    return new Promise((resolve, reject) => this.send({ type, header, items, chunks: [], resolve, reject }));
  }

  send(request) {
    const msg_id = ++this.lastId;
    this.requests.set(msg_id, request);
    if (this.welcomed) this.socket.write(frame(request.type, { ...request.header, msg_id }, request.items));
  }

  answered(corr_id) {
    const request = this.requests.get(corr_id);
    this.requests.delete(corr_id);
    return request;
  }

  /** Submitted jobs that are not simply new: known ones have a state, refused ones an error. */
  refused(items) {
    for (const { job_id, code, message } of items) if (code) this.end(job_id, new Error(`${code}: ${message}`));
  }

  end(job_id, error, result) {
    const waiting = this.awaited.get(job_id);
    this.awaited.delete(job_id);
    if (waiting) error ? waiting.reject(error) : waiting.resolve(result);
  }

  /** Read a result that is a blob. If the connection is lost meanwhile, the job's result is sent again, and this begins anew. */
  fetch(job_id, { sha256 }) {
    this.ask(BLOB_GET, { sha256, job_id })
      .then((bytes) => {
        const isWhole = createHash("sha256").update(bytes).digest("hex") === sha256;
        this.end(job_id, isWhole ? null : new Error(`the result of job ${job_id} is not the one with the sha256 ${sha256}`), bytes);
      })
      .catch((error) => this.end(job_id, error));
  }

  // -- the connection
  dial() {
    const dialledAt = Date.now();
    let received = Buffer.alloc(0);
    this.welcomed = false;
    this.socket = net.connect({ ...this.address, noDelay: true });
    this.socket.setTimeout(HELLO_TIMEOUT_MS, () => this.socket.destroy());
    this.socket.on("connect", () =>
      this.socket.write(frame(HELLO, { msg_id: ++this.lastId, client_id: `node-${process.pid}`, token: this.token, version: 2 })),
    );
    this.socket.on("data", (data) => {
      received = Buffer.concat([received, data]);
      while (received.length >= 8 && received.length >= 4 + received.readUInt32LE(0)) {
        const end = 4 + received.readUInt32LE(0), body = 8 + received.readUInt16LE(6);
        this.take(received[4], received[5], decode(received.subarray(8, body)), received.subarray(body, end));
        received = received.subarray(end);
      }
    });
    this.socket.on("error", () => {}); // "close" follows
    this.socket.on("close", () => {
      clearInterval(this.beat);
      if (this.closed) return;
      this.failedDials = Date.now() - dialledAt < 1000 ? this.failedDials + 1 : 0;
      const pause = this.failedDials ? Math.min(5000, 50 * 2 ** this.failedDials) * (0.5 + Math.random() / 2) : 0;
      setTimeout(() => this.closed || this.dial(), pause);
    });
  }

  take(type, flags, header, payload) {
    if (type === CHUNK) return this.takeChunk(header, payload);
    const body = decode(payload);
    const items = flags & BATCH ? body : body === null ? [] : [body];
    switch (type) {
      case WELCOME:
        return this.begin(header);
      case ACK:
        return this.answered(header.corr_id)?.resolve({ items });
      case REPLY:
        return this.answered(header.corr_id)?.resolve(body);
      case RESULT:
        for (const { job_id, state, outcome } of items) {
          const failed = state !== "SUCCEEDED" && new Error(`job ${job_id} is ${state}: ${outcome.message ?? ""}`);
          if (!failed && outcome.result_ref) this.fetch(job_id, outcome.result_ref);
          else this.end(job_id, failed || null, outcome.result ?? Buffer.alloc(0));
        }
        return;
      case ERROR:
        return this.failed(header);
    }
  }

  takeChunk({ corr_id, last }, bytes) {
    const chunks = this.requests.get(corr_id)?.chunks;
    chunks?.push(bytes);
    if (chunks && last) this.answered(corr_id).resolve(Buffer.concat(chunks));
  }

  begin({ idle_timeout_s = 60 }) {
    this.welcomed = true;
    this.socket.setTimeout(idle_timeout_s * 1000);
    this.beat = setInterval(() => this.socket.write(frame(HEARTBEAT, { msg_id: ++this.lastId })), (idle_timeout_s * 1000) / 3);
    const unanswered = [...this.requests.values()].filter(({ type }) => type === SUBMIT);
    const submitted = new Set(unanswered.flatMap(({ items }) => items.map(({ job_id }) => job_id)));
    this.requests.clear();
    unanswered.forEach((request) => this.send(request));
    this.watch([...this.awaited.keys()].filter((job_id) => !submitted.has(job_id)));
  }

  /** Ask for the results of jobs that an earlier connection submitted; those that have ended come at once. */
  watch(job_ids) {
    for (let at = 0; at < job_ids.length; at += ITEMS_MAX) {
      const some = job_ids.slice(at, at + ITEMS_MAX);
      this.ask(REQUEST, { verb: "watch" }, { job_ids: some }).catch((error) => some.forEach((job_id) => this.end(job_id, error)));
    }
  }

  failed({ corr_id, code, message }) {
    const error = new Error(`${code}: ${message}`);
    if (corr_id && this.requests.has(corr_id)) return this.answered(corr_id).reject(error);
    const isFinal = !this.welcomed && FINAL.has(code);
    if (isFinal || UNREADABLE.has(code)) {
      for (const request of this.requests.values()) request.reject(error);
      this.requests.clear();
    }
    if (isFinal) {
      for (const job_id of [...this.awaited.keys()]) this.end(job_id, error);
      this.close();
    }
  }
}

// ---------------------------------------------------------------------------------------------------- the program

const [url = "tcp://127.0.0.1:7000", howMany = "2000"] = process.argv.slice(2);
const client = new Client(url, process.env.TASUKI_TOKEN ?? "");
const run = randomUUID();
const numbers = Array.from({ length: Number(howMany) }, (_, place) => place + 1);
const jobs = numbers.map((n) => ({ job_id: `${run}-${n}`, subject: "math.square", payload: Buffer.from(String(n)) }));
let ended = 0;
const results = client.submit(jobs).map(async (result) => {
  const square = Number(await result);
  if (++ended % 100 === 0) console.error(`${ended} of ${jobs.length} jobs ended`);
  return square;
});
try {
  const squares = await Promise.all(results);
  console.log(`the sum of ${squares.length} squares is ${squares.reduce((sum, square) => sum + square, 0)}`);
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
}
client.close();
