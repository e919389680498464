// Values of an exhibit's picture: what the pointer is on, or a tap, is read out in the line below it. The drawing itself
// says it in title elements, and the table of values holds all of them for those who have no pointer.
"use strict";

function tellValues(picture) {
  const line = picture.querySelector(".told"), hint = line.value;
  const tell = (event) => {
    const mark = event.target.closest("g.value");
    line.value = mark ? mark.querySelector("title").textContent : hint;
  };
  const svg = picture.querySelector("svg");
  svg.addEventListener("pointerover", tell);
  svg.addEventListener("click", tell);
  line.hidden = false;
}

const picture = document.querySelector(".picture");
if (picture && picture.querySelector("g.value")) tellValues(picture);
