// Wires the page: each module owns one thing and finds its own elements.
import "./toggle.js";
import "./ages.js";
import "./live.js";
import "./links.js";
import "./logs.js";
import "./session.js";
import "./forms.js";
import "./steppers.js";
import "./anchor.js";
import "./dialog.js";
