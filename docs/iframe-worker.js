// Browsers refuse workers on pages opened from the file system: there the search of this site
// runs in a hidden frame instead, which answers to the same calls.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
      this.load(url).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    load(url) {
      const inner = this.frame.contentDocument;
      const script = inner.createElement("script");
      script.src = new URL(url, location.href).href;
      inner.documentElement.appendChild(script);
      return new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
