"use strict";

// Server-sent events from bytes that may be cut anywhere, inside a character included.
class EventReader {
  constructor() {
    this.decoder = new TextDecoder();
    this.buffer = "";
    this.data = [];
  }

  // Takes the next bytes and returns the data of the events that are complete with them.
  push(bytes) {
    this.buffer += this.decoder.decode(bytes, { stream: true });
    const lines = this.buffer.split(/\r\n|\n|\r(?!$)/);
    this.buffer = lines.pop();
    return lines.flatMap((line) => this.take(line));
  }

  // The data of an event whose last line or empty line never came.
  finish() {
    const rest = this.buffer + this.decoder.decode();
    this.buffer = "";
    return [...rest.split(/\r\n|\n|\r/).flatMap((line) => this.take(line)), ...this.take("")];
  }

  take(line) {
    if (line === "") {
      const whole = this.data.length ? [this.data.join("\n")] : [];
      this.data = [];
      return whole;
    }
    if (line.startsWith("data:")) this.data.push(line.slice(line[5] === " " ? 6 : 5));
    return []; // comments and other fields say nothing here
  }
}
