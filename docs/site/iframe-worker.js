/* Search in pages that are opened from a folder: browsers start no worker from file://, so one runs in a hidden frame. */
(function () {
  if (location.protocol !== "file:") return;
  class FrameWorker extends EventTarget {
    constructor(address) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.frame = frame;
      window.addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      const inside = frame.contentDocument;
      inside.open();
      inside.write(
        "<html><body><script>" +
          "postMessage = function (data) { parent.postMessage(data, '*') };" +
          "importScripts = function () { return Promise.resolve() };" +
          "<\/script><script src=\"" + address + "\"><\/script></body></html>"
      );
      inside.close();
      this.ready = new Promise((resolve) => frame.addEventListener("load", resolve, { once: true }));
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() { this.frame.remove(); }
  }
  window.Worker = FrameWorker;
})();
