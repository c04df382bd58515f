// Files of evidence behind folds, and a list of what could not be collected.

KINDS.dumps = async (host, { files, missing }) => () => {
  for (const { path, text } of files) {
    host.append(
      el(
        "details",
        {},
        el("summary", {}, path),
        el("pre", { class: "scroll tall dump", tabindex: "0", role: "region", "aria-label": path }, text),
      ),
    );
  }
  host.append(el("h4", {}, "Evidence that could not be collected"));
  if (!missing.length) {
    host.append(el("p", {}, "None: whatever was asked for was there."));
    return;
  }
  host.append(el("ul", {}, missing.map(({ rank, reason }) => el("li", {}, `rank ${rank}: ${reason}`))));
};
