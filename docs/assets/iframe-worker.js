// Over file:// a browser starts no worker. The search then runs in a hidden frame of the page, which is given what it needs of one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...addresses) => Promise.all(addresses.map((each) => this.load(each)));
      this.loaded = this.load(address);
    }

    load(address) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = address;
        script.onload = resolve;
        script.onerror = reject;
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
