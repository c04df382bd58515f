// A panel that could not be drawn: what it said stands in its place.

KINDS.failed = async (host, { reason }) => () => {
  host.append(el("p", { class: "empty" }, reason));
};
