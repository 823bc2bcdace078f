// Functions that teach, each with a sentence on what to look at.

export const PRESETS = [
  { name: 'sin', label: 'sin', f: 'sin(x)', box: { x: ['-3', '3'] }, eps: '1e-3', teach: 'A smooth function. Built by hand, nine keys make nine stairs. Compiled, five soft keys meet an error of 1e-3.' },
  { name: 'step', label: 'a step', f: 'sign(x)', box: { x: ['-1', '1'] }, eps: '0.01', norm: 2, keys: 8, teach: 'A jump is where one key takes over from another at high β. No continuous network is near a jump at every point, so here the error is an L₂ norm.' },
  { name: 'kink', label: 'a kink', f: 'abs(x)', box: { x: ['-1', '1'] }, eps: '1e-3', teach: 'A kink: two keys suffice. Each key pulls the output along one of the two lines, and β decides how sharp the corner is.' },
  { name: 'runge', label: 'Runge', f: '1/(1+25*x**2)', box: { x: ['-1', '1'] }, eps: '1e-3', keys: 24, teach: "Runge's function: polynomials through evenly spaced points swing wildly near the ends. Keys with a weight each do not." },
  { name: 'relu', label: 'ReLU', f: 'relu(x)', box: { x: ['-3', '3'] }, eps: '1e-3', teach: 'The activation of a feed-forward layer, computed by attention with two keys: this is how attnc replaces such layers.' },
  { name: 'gelu', label: 'GELU on ℝ', f: 'gelu(x)', box: { x: ['-inf', 'inf'] }, eps: '1e-3', view: 'compiled', teach: 'On all real numbers, with a proof that holds out to infinity. The keys carry the input itself, so the output can grow with x.' },
  { name: 'product', label: 'x · y', f: 'x*y', box: { x: ['-1', '1'], y: ['-1', '1'] }, eps: '1e-3', keys: 6, teach: 'A product of two inputs. By hand, keys cut the square into cells. Compiled, two keys that depend on the input suffice.' },
  { name: 'bump', label: 'a bump', f: 'exp(-4*(x**2+y**2))', box: { x: ['-1', '1'], y: ['-1', '1'] }, eps: '1e-3', keys: 9, teach: 'A bump in two variables. Move the pointer over a picture: the bars show how much attention each key gets at that point. By hand, circles show it, too.' },
];

// A guided text of five steps. Each sets the controls to what it speaks of.
export const TOUR = [
  {
    text: ['A key is a place with a value. The circles on the picture are the keys: each sits at its place x on the line and holds the value of the function there.', 'The input x is the query. Attention compares it with all keys and returns an average of their values. Near keys get more weight. That is the whole network.'],
    set: { view: 'byhand', keys: 9, beta: 667, heads: 1, arithmetic: 'float64' },
  },
  {
    text: ['Drag the temperature to the right. β grows: it multiplies the scores of all keys. The weights become one-hot: the nearest key takes all, and the output is a staircase.', 'Look at the third picture, the map of weights: each row is a key, and it is strong in colour where the key wins.'],
    set: { view: 'byhand', keys: 9, beta: 1000, heads: 1, arithmetic: 'float64' },
  },
  {
    text: ['Now drag it to the left. All keys get the same weight, and the output is flat: the mean of all values. This failure is called diffuse attention.', 'The mark on the slider is the best β: soft enough to join the stairs, sharp enough to tell the keys apart.'],
    set: { view: 'byhand', keys: 9, beta: 120, heads: 1, arithmetic: 'float64' },
  },
  {
    text: ['Add keys. Twice as many keys at a high β give half the error: that is the rate of the papers, an error of 1/keys.', 'An error of 0.001 would take 3,081 keys.'],
    set: { view: 'byhand', keys: 36, beta: 800, heads: 1, arithmetic: 'float64' },
  },
  {
    text: ['attnc also chooses the values of the keys. With β soft, it solves for the values so that their weighted averages, not the values themselves, follow the function.', 'Five keys then do the work of 3,081. And the error is not only seen but proven: the band in the second picture is a bound for every x.'],
    set: { view: 'compiled', beta: 500 },
  },
];
