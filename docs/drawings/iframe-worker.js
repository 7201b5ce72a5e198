/* Search runs in a worker, which browsers do not start for a page opened from a folder: run its script in a frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      inside.document.open();
      inside.document.write(`<!doctype html><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = script.onerror = done;
          document.head.appendChild(script);
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script>`);
      inside.document.close();
      this.ready = new Promise((done) => { inside.onload = done; });
    }
    set onmessage(listener) { this.addEventListener("message", listener); }
    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data, source: parent })));
    }
    terminate() { this.frame.remove(); }
  };
}
