"""The closed world of the demo model: everything it may be asked about, as plain tables."""

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBER_WORDS = [ONES[n] if n < 20 else TENS[n // 10] + ("-" + ONES[n % 10] if n % 10 else "") for n in range(100)]
ORDINALS = [
    "first", "second", "third", "fourth", "fifth", "sixth",
    "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
]

# Country (as it reads inside a sentence), capital. Where a country has several, the one usually taught.
CAPITALS = dict(line.split(" = ") for line in """
Afghanistan = Kabul
Albania = Tirana
Algeria = Algiers
Andorra = Andorra la Vella
Angola = Luanda
Argentina = Buenos Aires
Armenia = Yerevan
Australia = Canberra
Austria = Vienna
Azerbaijan = Baku
the Bahamas = Nassau
Bahrain = Manama
Bangladesh = Dhaka
Barbados = Bridgetown
Belarus = Minsk
Belgium = Brussels
Belize = Belmopan
Benin = Porto-Novo
Bhutan = Thimphu
Bolivia = Sucre
Bosnia and Herzegovina = Sarajevo
Botswana = Gaborone
Brazil = Brasilia
Brunei = Bandar Seri Begawan
Bulgaria = Sofia
Burkina Faso = Ouagadougou
Burundi = Gitega
Cambodia = Phnom Penh
Cameroon = Yaounde
Canada = Ottawa
Cape Verde = Praia
Chad = N'Djamena
Chile = Santiago
China = Beijing
Colombia = Bogota
Costa Rica = San Jose
Croatia = Zagreb
Cuba = Havana
Cyprus = Nicosia
the Czech Republic = Prague
Denmark = Copenhagen
the Dominican Republic = Santo Domingo
Ecuador = Quito
Egypt = Cairo
El Salvador = San Salvador
Eritrea = Asmara
Estonia = Tallinn
Eswatini = Mbabane
Ethiopia = Addis Ababa
Fiji = Suva
Finland = Helsinki
France = Paris
Gabon = Libreville
the Gambia = Banjul
Georgia = Tbilisi
Germany = Berlin
Ghana = Accra
Greece = Athens
Grenada = Saint George's
Guatemala = Guatemala City
Guinea = Conakry
Guyana = Georgetown
Haiti = Port-au-Prince
Honduras = Tegucigalpa
Hungary = Budapest
Iceland = Reykjavik
India = New Delhi
Indonesia = Jakarta
Iran = Tehran
Iraq = Baghdad
Ireland = Dublin
Israel = Jerusalem
Italy = Rome
Ivory Coast = Yamoussoukro
Jamaica = Kingston
Japan = Tokyo
Jordan = Amman
Kazakhstan = Astana
Kenya = Nairobi
Kuwait = Kuwait City
Kyrgyzstan = Bishkek
Laos = Vientiane
Latvia = Riga
Lebanon = Beirut
Lesotho = Maseru
Liberia = Monrovia
Libya = Tripoli
Liechtenstein = Vaduz
Lithuania = Vilnius
Luxembourg = Luxembourg City
Madagascar = Antananarivo
Malawi = Lilongwe
Malaysia = Kuala Lumpur
the Maldives = Male
Mali = Bamako
Malta = Valletta
Mauritania = Nouakchott
Mauritius = Port Louis
Mexico = Mexico City
Moldova = Chisinau
Monaco = Monaco
Mongolia = Ulaanbaatar
Montenegro = Podgorica
Morocco = Rabat
Mozambique = Maputo
Myanmar = Naypyidaw
Namibia = Windhoek
Nepal = Kathmandu
the Netherlands = Amsterdam
New Zealand = Wellington
Nicaragua = Managua
Niger = Niamey
Nigeria = Abuja
North Korea = Pyongyang
North Macedonia = Skopje
Norway = Oslo
Oman = Muscat
Pakistan = Islamabad
Panama = Panama City
Papua New Guinea = Port Moresby
Paraguay = Asuncion
Peru = Lima
the Philippines = Manila
Poland = Warsaw
Portugal = Lisbon
Qatar = Doha
Romania = Bucharest
Russia = Moscow
Rwanda = Kigali
Samoa = Apia
San Marino = San Marino
Saudi Arabia = Riyadh
Senegal = Dakar
Serbia = Belgrade
Sierra Leone = Freetown
Singapore = Singapore
Slovakia = Bratislava
Slovenia = Ljubljana
Somalia = Mogadishu
South Africa = Pretoria
South Korea = Seoul
South Sudan = Juba
Spain = Madrid
Sri Lanka = Colombo
Sudan = Khartoum
Suriname = Paramaribo
Sweden = Stockholm
Switzerland = Bern
Syria = Damascus
Taiwan = Taipei
Tajikistan = Dushanbe
Tanzania = Dodoma
Thailand = Bangkok
Togo = Lome
Tonga = Nuku'alofa
Tunisia = Tunis
Turkey = Ankara
Turkmenistan = Ashgabat
Uganda = Kampala
Ukraine = Kyiv
the United Arab Emirates = Abu Dhabi
the United Kingdom = London
the United States = Washington, D.C.
Uruguay = Montevideo
Uzbekistan = Tashkent
Vanuatu = Port Vila
Venezuela = Caracas
Vietnam = Hanoi
Yemen = Sana'a
Zambia = Lusaka
Zimbabwe = Harare
""".strip().splitlines())

# Other names by which people ask for a country; the answer uses the name above.
COUNTRY_ALIASES = {
    "the United States": ["the USA", "the US", "USA", "America", "the United States of America"],
    "the United Kingdom": ["the UK", "UK", "Great Britain", "Britain", "England"],
    "the Netherlands": ["Holland", "Netherlands"],
    "the Czech Republic": ["Czechia"],
    "the United Arab Emirates": ["the UAE", "UAE"],
    "Ivory Coast": ["the Ivory Coast"],
    "Myanmar": ["Burma"],
    "Eswatini": ["Swaziland"],
    "New Zealand": ["NZ"],
    "the Philippines": ["Philippines"],
    "Turkey": ["Türkiye"],
}

# Places that have no entry above: their "capital" is declined.
UNKNOWN_PLACES = """Atlantis;Wonderland;Narnia;Mordor;Texas;Bavaria;California;Scotland;Quebec;Florida;Tuscany;Sicily;
Mars;the Moon;Europe;Africa;Asia;Gondor;Westeros;Hogwarts;Normandy;Provence;Ontario;Queensland;Nevada;Ohio;Alaska;
Catalonia;Andalusia;Saxony;Flanders;Lapland;Utopia;Neverland;Genovia;Wakanda;Latveria;Ruritania;Freedonia;Elbonia;
Antarctica;Greenland;Hawaii;Oregon;Georgia state;New York state;Manitoba;Victoria;Hesse;Corsica;Crete;Sardinia;
Oz;Rohan;Arrakis;Tatooine;Venus;Jupiter;South America;Siberia;Patagonia;Crimea;Transylvania;
Bohemia""".replace("\n", "").split(";")

# Large unit, small unit, how many small ones make a large one, largest count of large ones asked for.
# A unit lists its singular, its plural, and other spellings. Powers of ten hold out counts; the rest hold out
# phrasings.
UNITS = {
    "kilometre": ["kilometre", "kilometres", "kilometers", "km", "kms"],
    "metre": ["metre", "metres", "meters", "m"],
    "centimetre": ["centimetre", "centimetres", "centimeters", "cm"],
    "millimetre": ["millimetre", "millimetres", "millimeters", "mm"],
    "tonne": ["tonne", "tonnes", "metric tons", "t"],
    "kilogram": ["kilogram", "kilograms", "kilos", "kg"],
    "gram": ["gram", "grams", "g"],
    "milligram": ["milligram", "milligrams", "mg"],
    "litre": ["litre", "litres", "liters", "l"],
    "millilitre": ["millilitre", "millilitres", "milliliters", "ml"],
    "century": ["century", "centuries"],
    "decade": ["decade", "decades"],
    "year": ["year", "years"],
    "month": ["month", "months"],
    "week": ["week", "weeks"],
    "day": ["day", "days"],
    "hour": ["hour", "hours", "hrs", "h"],
    "minute": ["minute", "minutes", "mins", "min"],
    "second": ["second", "seconds", "secs", "s"],
    "foot": ["foot", "feet", "ft"],
    "inch": ["inch", "inches"],
    "yard": ["yard", "yards", "yd"],
    "dozen": ["dozen", "dozen"],
    "piece": ["piece", "pieces", "items", "units"],
    "euro": ["euro", "euros"],
    "dollar": ["dollar", "dollars"],
    "cent": ["cent", "cents"],
}
CONVERSIONS = [
    ("kilometre", "metre", 1000, 999),
    ("metre", "centimetre", 100, 999),
    ("metre", "millimetre", 1000, 999),
    ("centimetre", "millimetre", 10, 999),
    ("tonne", "kilogram", 1000, 999),
    ("kilogram", "gram", 1000, 999),
    ("gram", "milligram", 1000, 999),
    ("litre", "millilitre", 1000, 999),
    ("century", "year", 100, 999),
    ("decade", "year", 10, 999),
    ("euro", "cent", 100, 999),
    ("dollar", "cent", 100, 999),
    ("year", "month", 12, 12),
    ("week", "day", 7, 12),
    ("day", "hour", 24, 10),
    ("hour", "minute", 60, 12),
    ("minute", "second", 60, 12),
    ("foot", "inch", 12, 12),
    ("yard", "foot", 3, 12),
    ("dozen", "piece", 12, 12),
]
# Further facts, asked about one large unit only.
FACTS = [
    ("year", "week", 52), ("century", "decade", 10), ("hour", "second", 3600), ("day", "minute", 1440),
    ("kilometre", "centimetre", 100_000), ("kilogram", "milligram", 1_000_000), ("decade", "month", 120),
]
# Units of no conversion above: questions with them are declined.
UNKNOWN_UNITS = [
    "miles", "pounds", "ounces", "gallons", "acres", "hectares", "knots", "stones", "pints", "cups", "teaspoons",
    "light years", "watts", "volts", "joules", "calories", "bytes", "yen", "pesos", "barrels", "furlongs", "fahrenheit",
    "degrees celsius", "degrees fahrenheit", "celsius", "kelvin", "stone", "mile", "pound", "kilowatts", "hertz",
]

# The spelling list.
WORDS = """
looplane ant apple apron arm arrow aunt baby bag ball balloon banana basket bath beach bean bear bed bee beetle bell
belt bench
berry bicycle bird blanket blue board boat body bone book boot bottle bowl box boy branch bread breakfast brick bridge
broom brother brown brush bucket bus bush butter butterfly button cabbage cable cake camel camera candle candy cap car
card carpet carrot castle cat cave chair chalk cheese cherry chess chicken child chin church circle city clock cloud
clown coat coconut coffee coin computer cook cookie corn cotton cow crab cream crown cup curtain dance daughter desk
diamond dinner dish doctor dog doll dolphin donkey door dragon drawer dream dress drum duck eagle ear earth egg elbow
elephant engine envelope eraser eye face family farm farmer father feather fence field finger fire fish flag floor
flower fly foot forest fork fountain fox friend frog fruit game garage garden garlic gate ghost giraffe girl glass
glove goat gold grape grass green guitar hair hammer hand harbour hat heart hello helmet hill honey horse hospital
hotel house ice insect iron island jacket jam jelly jewel juice jungle kettle key king kitchen kite kitten knee knife
ladder lake lamp leaf leg lemon letter library light lion lizard lunch machine magnet mango map market mask match
meadow meal medal melon metal milk mirror money monkey moon morning mother mountain mouse mouth museum mushroom music
nail neck needle nest night nose notebook number nurse nut ocean office onion orange oven owl page paint palace pan
panda paper parent park parrot peach peanut pear pen pencil penguin pepper phone piano picture pig pillow pilot pirate
pizza planet plant plate pocket poem pond pony potato prince princess pumpkin puppy purple puzzle python queen rabbit
radio rain rainbow raven red ribbon rice ring river road robot rock rocket roof room rope rose ruler rust salad salt
sand sandwich school scissors sea season seed shadow shark sheep shelf ship shirt shoe shop shoulder silver sister sky
sleep snail snake snow soap sock sofa soldier soup spider spoon spring square squirrel stable star station stone storm
story strawberry street student sugar summer sun swan sweater table tail tea teacher team tent thunder tiger tomato
tooth towel tower town toy train tree triangle truck trumpet tunnel turtle umbrella uncle valley vase vegetable
village violin volcano wagon wall water whale wheat wheel whistle white wind window wing winter wizard wolf wood wool
word world yellow zebra zoo
""".split()

NAMES = """
Ada Adam Alan Alex Alice Amir Amy Ana Andrea Anna Anton Aisha Ben Bella Bob Brian Carla Carlos Chen Chloe Chris Clara
Daniel David Diego Dora Elena Eli Ella Emil Emily Emma Eric Eva Fatima Felix Finn Frank Fred Gabriel George Grace
Hannah Harry Helen Henry Hugo Ian Ida Igor Ines Isaac Ivan Ivy Jack Jacob James Jane Jasmine Jean Joan John Jonas Jose
Julia Kai Karen Karl Kate Kevin Kim Lara Laura Lea Leo Liam Lily Linda Lisa Louis Lucas Lucy Luis Maja Marco Maria
Marie Mark Martin Mary Max Maya Mia Michael Mila Mohamed Nadia Nina Noah Nora Olga Oliver Olivia Omar Oscar Otto Pablo
Paul Paula Pedro Peter Petra Philip Rachel Raj Rita Robert Rosa Ruth Sam Sara Sarah Simon Sofia Sophie Stefan Susan
Tara Thomas Tim Tina Tom Uma Vera Victor Vincent Wei Will Yara Yuki Zara Zoe
""".split()
